#include "ucp_api.hpp"

#include <dlfcn.h>
#include <stdlib.h>

#include <fstream>
#include <mutex>
#include <stdexcept>

namespace kvferry {

namespace {

template <typename Function>
void bind(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("UCX lacks the function ") + name);
}

// Other packages' copies carry a hash at the end of the name.
bool names_ucp(const std::string& path) { return path.compare(path.rfind('/') + 1, 6, "libucp") == 0; }

// The file of a libucp that is in the process, whoever loaded it; empty when there is none.
std::string present_library() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path != std::string::npos && names_ucp(line)) return line.substr(path);
  }
  return "";
}

std::string folder(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  const std::string resolved = real == nullptr ? path : real;
  free(real);
  return resolved.substr(0, resolved.rfind('/'));
}

// Whether loading `wanted` gives what is `present`: one installation has several names for its library.
bool is_present(const std::string& wanted, const std::string& present) {
  if (wanted.find('/') != std::string::npos) return names_ucp(wanted) && folder(wanted) == folder(present);
  void* library = dlopen(wanted.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  dlclose(library);
  return true;
}

[[noreturn]] void refuse(const std::string& version, const std::string& present, const std::string& wanted) {
  throw std::runtime_error("UCX " + version + "is loaded from " + present + "; a second one, " + wanted +
                           ", cannot share the process with it");
}

UcpApi load(std::string path) {
  const std::string present = present_library();
  if (present.empty())
    keep_ucx_to_itself();
  else if (is_present(path, present))
    path = present;
  else
    refuse("", present, path);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("UCX cannot be loaded from " + path + ": " + dlerror());
  UcpApi api;
#define KVFERRY_BIND(name) bind(library, #name, api.name);
  KVFERRY_UCP_FUNCTIONS(KVFERRY_BIND)
#undef KVFERRY_BIND
  bind(library, "ucs_status_string", api.ucs_status_string);  // in libucs, which libucp depends on
  api.version = api.ucp_get_version_string();
  Dl_info where;
  if (dladdr(reinterpret_cast<void*>(api.ucp_init_version), &where) != 0) api.path = where.dli_fname;
  return api;
}

}  // namespace

void keep_ucx_to_itself() {
  // UCX reads these when it is loaded. It must neither take over the process's signal handlers nor patch its memory
  // functions: both belong to whoever owns the process. Nor must it write to the process's output, where it otherwise
  // reports each peer that dies. A value that the user has set stays.
  setenv("UCX_HANDLE_ERRORS", "none", 0);
  setenv("UCX_ERROR_SIGNALS", "", 0);
  setenv("UCX_MEM_MMAP_HOOK_MODE", "none", 0);
  setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
  setenv("UCX_LOG_FILE", "stderr", 0);
}

const UcpApi& load_ucp(const std::string& path) {
  static std::mutex mutex;
  static UcpApi* loaded = nullptr;  // never unloaded: its threads and mappings last as long as the process
  static std::string loaded_from;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    loaded = new UcpApi(load(path));
    loaded_from = path;
  } else if (path != loaded_from && (path.find('/') == std::string::npos || !is_present(path, loaded->path))) {
    // A name without a folder may mean either: the loader would say that the wheel's is the system's.
    refuse(loaded->version + " ", loaded->path, path);
  }
  return *loaded;
}

}  // namespace kvferry
