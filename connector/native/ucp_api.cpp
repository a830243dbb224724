#include "ucp_api.hpp"

#include <dlfcn.h>
#include <stdlib.h>

#include <mutex>
#include <stdexcept>

namespace kvferry {

namespace {

template <typename Function>
void bind(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("UCX lacks the function ") + name);
}

void keep_out_of_the_process() {
  // UCX reads these when it is loaded. It must neither take over the process's signal handlers nor patch its memory
  // functions: both belong to whoever owns the process. A value that the user has set stays.
  setenv("UCX_HANDLE_ERRORS", "none", 0);
  setenv("UCX_ERROR_SIGNALS", "", 0);
  setenv("UCX_MEM_MMAP_HOOK_MODE", "none", 0);
  setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
}

UcpApi load(const std::string& path) {
  keep_out_of_the_process();
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

const UcpApi& load_ucp(const std::string& path) {
  static std::mutex mutex;
  static UcpApi* loaded = nullptr;  // never unloaded: its threads and mappings last as long as the process
  static std::string loaded_from;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    loaded = new UcpApi(load(path));
    loaded_from = path;
  } else if (path != loaded_from && path != loaded->path) {
    throw std::runtime_error("UCX " + loaded->version + " is loaded from " + loaded->path + "; a second one, " + path +
                             ", cannot share the process with it");
  }
  return *loaded;
}

}  // namespace kvferry
