// UCP, loaded at run time: the system's library or the wheel's, never two of them in one process.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace kvferry {

// What is used of UCP. Every function exists, with this meaning, since UCX 1.13.
#define KVFERRY_UCP_FUNCTIONS(X) \
  X(ucp_get_version_string)      \
  X(ucp_init_version)            \
  X(ucp_cleanup)                 \
  X(ucp_config_read)             \
  X(ucp_config_modify)           \
  X(ucp_config_release)          \
  X(ucp_worker_create)           \
  X(ucp_worker_destroy)          \
  X(ucp_worker_progress)         \
  X(ucp_worker_arm)              \
  X(ucp_worker_signal)           \
  X(ucp_worker_get_efd)          \
  X(ucp_worker_get_address)      \
  X(ucp_worker_release_address)  \
  X(ucp_mem_map)                 \
  X(ucp_mem_unmap)               \
  X(ucp_rkey_pack)               \
  X(ucp_rkey_buffer_release)     \
  X(ucp_ep_rkey_unpack)          \
  X(ucp_rkey_destroy)            \
  X(ucp_ep_create)               \
  X(ucp_ep_close_nbx)            \
  X(ucp_ep_flush_nbx)            \
  X(ucp_get_nbx)                 \
  X(ucp_put_nbx)                 \
  X(ucp_request_check_status)    \
  X(ucp_request_free)

struct UcpApi {
#define KVFERRY_POINTER(name) decltype(&::name) name = nullptr;
  KVFERRY_UCP_FUNCTIONS(KVFERRY_POINTER)
#undef KVFERRY_POINTER
  decltype(&::ucs_status_string) ucs_status_string = nullptr;
  std::string version;  // "1.22.0"
  std::string path;     // the file that was loaded

  std::string text(ucs_status_t status) const { return ucs_status_string(status); }
};

// What UCX finds in the environment when it is loaded, set so that it leaves the process alone. For whoever loads one.
void keep_ucx_to_itself();

// Loads `path` (or a name that the loader finds) once per process; the same installation again gives the same library.
// Throws std::runtime_error when it cannot be loaded, or when another one is in the process already, whoever loaded it.
const UcpApi& load_ucp(const std::string& path);

}  // namespace kvferry
