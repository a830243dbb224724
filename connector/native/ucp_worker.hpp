// One UCP worker: registration, endpoints, batches of one-sided operations, and a progress thread that sleeps in epoll.
//
// Every batch has a deadline: a peer that has stopped is never reported by UCX. The progress thread sleeps no longer
// than until the next one, and tells of a peer that has missed one, once; the owner then fences it.
//
// The poster progresses briefly itself, so that a short transfer costs no thread switch; then the progress thread takes
// over. It arms the worker and sleeps: an idle worker costs nothing, and a target whose transport emulates one-sided
// operations is still served without its interpreter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "deadline.hpp"
#include "events.hpp"
#include "runs.hpp"
#include "ucp_api.hpp"

namespace kvferry {

class UcpWorker {
 public:
  UcpWorker(const UcpApi& api, std::string name, const std::vector<std::pair<std::string, std::string>>& config);
  ~UcpWorker();

  int64_t register_memory(uintptr_t address, size_t length);
  std::string address();
  std::string packed_key(int64_t region);
  // Each remote region is (base address, length, packed key).
  struct RemoteRegion {
    uint64_t base;
    int64_t length;
    std::string key;
  };
  int64_t connect(const std::string& address, const std::vector<RemoteRegion>& regions);
  int64_t post(int64_t peer, bool write, int64_t local_region, int64_t remote_region, const int64_t* local,
               const int64_t* remote, const int64_t* length, size_t count, double timeout_s);
  // Closes the peer's endpoint by force. Every operation of it is terminal from the event that says so, which comes
  // after the events of its batches; how soon is UCX's to say. Unknown and fenced peers are left alone.
  void fence(int64_t peer);
  // Fences every peer, and waits for it. Throws std::runtime_error if UCX does not let go within `timeout_s`: then
  // nothing can be said of the memory, nothing has been given back, and it can be tried again.
  void close(double timeout_s);
  EventQueue& events() { return events_; }

 private:
  struct Region {
    char* address;
    size_t length;
    ucp_mem_h handle;
  };
  struct Peer {
    UcpWorker* worker;
    int64_t id;
    ucp_ep_h endpoint = nullptr;
    std::vector<std::pair<RemoteRegion, ucp_rkey_h>> regions;
    std::string down;  // why nothing can be posted to it any more
    int64_t batches = 0;
    bool fenced = false;
    ucs_status_ptr_t closing = nullptr;  // the request that closes the endpoint, once it is fenced
  };
  struct Batch {
    UcpWorker* worker;
    Peer* peer;
    int64_t id;
    bool write;
    bool flush;  // still to be flushed when its operations are done
    int64_t bytes;
    double timeout_s;
    int64_t pending = 0;
    ucs_status_t error = UCS_OK;
    std::multimap<Clock::time_point, Batch*>::iterator deadline{};
  };

  std::unique_lock<std::mutex> turn();
  void expect_open() const;
  void start_fence(Peer& peer);
  void finish_fences();
  bool has_let_go(Peer& peer) const;

  static void on_operation(void* request, ucs_status_t status, void* batch);
  static void on_endpoint_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  void operation_ended(Batch* batch, ucs_status_t status);
  void account(Batch* batch, ucs_status_ptr_t request);
  void check(ucs_status_t status, const char* what) const;
  Peer& find(int64_t peer);
  Region& region(int64_t index);
  bool progress_some();  // whether nothing is left to do for now
  void lose(Peer& peer, EventKind kind, std::string cause);
  void tell_of_late_batches();
  int sleep_ms();  // 0 when there is something to do at once
  void wake();
  void run();

  const UcpApi& api_;
  const std::string name_;
  EventQueue events_;
  std::mutex mutex_;             // guards all below and every call into the worker
  std::atomic<int> waiting_{0};  // threads that want the mutex
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int epoll_ = -1;
  std::vector<Region> regions_;
  std::unordered_map<int64_t, std::unique_ptr<Peer>> peers_;
  std::multimap<Clock::time_point, Batch*> deadlines_;  // of all that are in flight; one that was missed is at the end
  std::vector<int64_t> fencing_;
  std::condition_variable fences_ended_;
  int64_t next_peer_ = 0;
  int64_t next_batch_ = 0;
  std::atomic<bool> closing_{false};
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace kvferry
