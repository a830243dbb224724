#include "ucp_worker.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>

namespace kvferry {

namespace {

// A missed wake-up would cost this much, once; it is not how anything is usually noticed.
constexpr int kSleepMs = 1000;
// Enough for a short transfer to end. With some transports progressing is copying: a post must not copy a large one.
constexpr auto kProgressInPost = std::chrono::microseconds(20);
constexpr int kProgressBeforeYield = 256;
// UCX need not wake anyone for what it does in small steps while it closes an endpoint.
constexpr int kSleepWhileFencingMs = 1;

}  // namespace

UcpWorker::UcpWorker(const UcpApi& api, std::string name,
                     const std::vector<std::pair<std::string, std::string>>& config)
    : api_(api), name_(std::move(name)) {
  ucp_config_t* settings;
  check(api_.ucp_config_read(nullptr, nullptr, &settings), "reading the configuration");
  for (const auto& [key, value] : config) {
    const ucs_status_t status = api_.ucp_config_modify(settings, key.c_str(), value.c_str());
    if (status != UCS_OK) {
      api_.ucp_config_release(settings);
      check(status, ("setting " + key + "=" + value).c_str());
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  const ucs_status_t status = api_.ucp_init_version(1, 13, &params, settings, &context_);
  api_.ucp_config_release(settings);
  check(status, "initialising");
  try {
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    check(api_.ucp_worker_create(context_, &worker, &worker_), "creating a worker");
    int efd;
    check(api_.ucp_worker_get_efd(worker_, &efd), "asking for the worker's descriptor");
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, efd, &event) != 0)
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  } catch (...) {
    if (epoll_ >= 0) ::close(epoll_);
    if (worker_ != nullptr) api_.ucp_worker_destroy(worker_);
    api_.ucp_cleanup(context_);
    throw;
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
}

UcpWorker::~UcpWorker() {
  // `close` throws only when UCX holds on to memory that is about to go away. Carrying on would corrupt it.
  close(10.0);
}

void UcpWorker::check(ucs_status_t status, const char* what) const {
  if (status != UCS_OK) throw std::runtime_error("UCX " + api_.version + ", " + what + ": " + api_.text(status));
}

// The progress thread holds the mutex nearly always while there is traffic, and a mutex is not fair: it lets those pass
// who have said that they wait.
std::unique_lock<std::mutex> UcpWorker::turn() {
  ++waiting_;
  std::unique_lock<std::mutex> lock(mutex_);
  --waiting_;
  return lock;
}

void UcpWorker::expect_open() const {
  if (closed_) throw std::runtime_error("the UCX worker of " + name_ + " is closed");
}

int64_t UcpWorker::register_memory(uintptr_t address, size_t length) {
  const auto lock = turn();
  expect_open();
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = reinterpret_cast<void*>(address);
  params.length = length;
  ucp_mem_h handle;
  check(api_.ucp_mem_map(context_, &params, &handle), "registering memory");
  regions_.push_back({reinterpret_cast<char*>(address), length, handle});
  return static_cast<int64_t>(regions_.size()) - 1;
}

std::string UcpWorker::address() {
  const auto lock = turn();
  expect_open();
  ucp_address_t* address;
  size_t length;
  check(api_.ucp_worker_get_address(worker_, &address, &length), "asking for the worker's address");
  std::string copy(reinterpret_cast<const char*>(address), length);
  api_.ucp_worker_release_address(worker_, address);
  return copy;
}

std::string UcpWorker::packed_key(int64_t index) {
  const auto lock = turn();
  expect_open();
  void* key;
  size_t length;
  check(api_.ucp_rkey_pack(context_, region(index).handle, &key, &length), "packing a remote key");
  std::string copy(static_cast<const char*>(key), length);
  api_.ucp_rkey_buffer_release(key);
  return copy;
}

int64_t UcpWorker::connect(const std::string& address, const std::vector<RemoteRegion>& regions) {
  const auto lock = turn();
  expect_open();
  const int64_t id = next_peer_++;  // never used again, also when this fails: events may name it
  auto created = std::make_unique<Peer>();
  Peer& peer = *created;
  peer.worker = this;
  peer.id = id;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_endpoint_error;
  params.err_handler.arg = &peer;
  check(api_.ucp_ep_create(worker_, &params, &peer.endpoint), "connecting");
  peers_[id] = std::move(created);
  wake();
  for (const RemoteRegion& remote : regions) {
    ucp_rkey_h key;
    const ucs_status_t status = api_.ucp_ep_rkey_unpack(peer.endpoint, remote.key.data(), &key);
    if (status != UCS_OK) start_fence(peer);
    check(status, "unpacking the peer's remote key");
    peer.regions.emplace_back(remote, key);
  }
  return id;
}

UcpWorker::Region& UcpWorker::region(int64_t index) {
  if (index < 0 || index >= static_cast<int64_t>(regions_.size()))
    throw OutOfBounds("there is no local region " + std::to_string(index) + "; nothing was posted");
  return regions_[static_cast<size_t>(index)];
}

UcpWorker::Peer& UcpWorker::find(int64_t peer) {
  auto found = peers_.find(peer);
  if (found == peers_.end() || found->second->fenced)
    throw std::runtime_error("peer " + std::to_string(peer) + " is fenced or unknown; connect to it again");
  return *found->second;
}

int64_t UcpWorker::post(int64_t peer_id, bool write, int64_t local_region, int64_t remote_region, const int64_t* local,
                        const int64_t* remote, const int64_t* length, size_t count, double timeout_s) {
  const auto due = after(timeout_s);
  const auto lock = turn();
  Peer& peer = find(peer_id);
  if (!peer.down.empty()) throw std::runtime_error("peer " + std::to_string(peer_id) + " is down: " + peer.down);
  const Region& here = region(local_region);
  if (remote_region < 0 || remote_region >= static_cast<int64_t>(peer.regions.size()))
    throw OutOfBounds("the peer has no region " + std::to_string(remote_region) + "; nothing was posted");
  const auto& [there, key] = peer.regions[static_cast<size_t>(remote_region)];
  const std::vector<Run> runs =
      checked_and_merged(local, remote, length, count, static_cast<int64_t>(here.length), there.length);

  auto* batch = new Batch{this, &peer, next_batch_++, write, write, total_bytes(runs), timeout_s};
  batch->deadline = deadlines_.emplace(due, batch);
  ++peer.batches;
  batch->pending = 1;  // keeps it from ending before all of it is posted
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
  params.cb.send = on_operation;
  params.user_data = batch;
  params.memh = here.handle;
  for (const Run& run : runs) {
    const auto bytes = static_cast<size_t>(run.length);
    const uint64_t target = there.base + static_cast<uint64_t>(run.remote);
    account(batch, write ? api_.ucp_put_nbx(peer.endpoint, here.address + run.local, bytes, target, key, &params)
                         : api_.ucp_get_nbx(peer.endpoint, here.address + run.local, bytes, target, key, &params));
    if (batch->error != UCS_OK) break;
  }
  const int64_t id = batch->id;
  operation_ended(batch, UCS_OK);
  const auto deadline = Clock::now() + kProgressInPost;
  while (api_.ucp_worker_progress(worker_) != 0 && Clock::now() < deadline) {
  }
  wake();
  return id;
}

void UcpWorker::account(Batch* batch, ucs_status_ptr_t request) {
  if (UCS_PTR_IS_PTR(request))
    ++batch->pending;
  else if (UCS_PTR_IS_ERR(request) && batch->error == UCS_OK)
    batch->error = UCS_PTR_STATUS(request);
}

void UcpWorker::on_operation(void* request, ucs_status_t status, void* data) {
  auto* batch = static_cast<Batch*>(data);
  batch->worker->api_.ucp_request_free(request);
  batch->worker->operation_ended(batch, status);
}

void UcpWorker::operation_ended(Batch* batch, ucs_status_t status) {
  if (status != UCS_OK && batch->error == UCS_OK) batch->error = status;
  if (--batch->pending > 0) return;
  // What was put before a fence may not have arrived, and a closed endpoint cannot be flushed.
  if (batch->flush && batch->peer->fenced && batch->error == UCS_OK) batch->error = UCS_ERR_CANCELED;
  if (batch->flush && batch->error == UCS_OK) {
    // A put is complete for its sender when its buffer may be reused; only a flush says that it has arrived.
    batch->flush = false;
    batch->pending = 1;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = on_operation;
    params.user_data = batch;
    account(batch, api_.ucp_ep_flush_nbx(batch->peer->endpoint, &params));
    if (--batch->pending > 0) return;
  }
  --batch->peer->batches;
  deadlines_.erase(batch->deadline);
  events_.push({EventKind::kCompleted, batch->peer->id, batch->id,
                batch->error == UCS_OK ? std::string() : api_.text(batch->error)});
  delete batch;
}

void UcpWorker::on_endpoint_error(void* data, ucp_ep_h, ucs_status_t status) {
  auto* peer = static_cast<Peer*>(data);
  peer->worker->lose(*peer, EventKind::kLost, peer->worker->api_.text(status));
}

void UcpWorker::lose(Peer& peer, EventKind kind, std::string cause) {
  if (peer.fenced || !peer.down.empty()) return;
  peer.down = cause;
  events_.push({kind, peer.id, -1, std::move(cause)});
}

void UcpWorker::tell_of_late_batches() {
  const auto now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Batch* late = deadlines_.begin()->second;
    deadlines_.erase(late->deadline);
    late->deadline = deadlines_.emplace(Clock::time_point::max(), late);
    lose(*late->peer, EventKind::kLate, lateness(late->id, late->write, late->bytes, late->timeout_s));
  }
}

void UcpWorker::fence(int64_t peer) {
  const auto lock = turn();
  auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  start_fence(*found->second);
  wake();
}

void UcpWorker::start_fence(Peer& peer) {
  if (peer.fenced) return;
  peer.fenced = true;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  peer.closing = api_.ucp_ep_close_nbx(peer.endpoint, &params);
  fencing_.push_back(peer.id);
}

void UcpWorker::finish_fences() {
  std::vector<int64_t> still;
  for (int64_t id : fencing_) {
    // Until it has let go UCX may call back with this peer and write into our memory: both must stay.
    Peer& peer = *peers_.at(id);
    if (!has_let_go(peer)) {
      still.push_back(id);
      continue;
    }
    for (auto& entry : peer.regions) api_.ucp_rkey_destroy(entry.second);
    peers_.erase(id);
    events_.push({EventKind::kFenced, id, -1, ""});
  }
  if (fencing_.size() != still.size()) fences_ended_.notify_all();
  fencing_.swap(still);
}

bool UcpWorker::has_let_go(Peer& peer) const {
  if (UCS_PTR_IS_PTR(peer.closing)) {
    if (api_.ucp_request_check_status(peer.closing) == UCS_INPROGRESS) return false;
    api_.ucp_request_free(peer.closing);
    peer.closing = nullptr;
  }
  return peer.batches == 0;
}

void UcpWorker::close(double timeout_s) {
  {
    auto lock = turn();
    if (closed_) return;
    for (auto& entry : peers_) start_fence(*entry.second);
    wake();
    if (!fences_ended_.wait_until(lock, after(timeout_s), [this] { return peers_.empty(); }))
      throw std::runtime_error("UCX " + api_.version + " has not let go of " + std::to_string(peers_.size()) +
                               " peers after their endpoints were closed by force; this process must end");
    closed_ = true;
    closing_ = true;
    wake();
  }
  thread_.join();
  for (Region& region : regions_) api_.ucp_mem_unmap(context_, region.handle);
  regions_.clear();
  api_.ucp_worker_destroy(worker_);
  api_.ucp_cleanup(context_);
  ::close(epoll_);
}

bool UcpWorker::progress_some() {
  for (int i = 0; i < kProgressBeforeYield && waiting_ == 0; ++i)
    if (api_.ucp_worker_progress(worker_) == 0) return true;
  return false;
}

void UcpWorker::wake() { api_.ucp_worker_signal(worker_); }

int UcpWorker::sleep_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool idle = progress_some();
  tell_of_late_batches();
  finish_fences();
  if (!idle || api_.ucp_worker_arm(worker_) == UCS_ERR_BUSY) return 0;
  if (!fencing_.empty()) return kSleepWhileFencingMs;
  if (deadlines_.empty()) return kSleepMs;
  // Rounded up: waking before the deadline would be waking twice.
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadlines_.begin()->first - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 1, kSleepMs));
}

void UcpWorker::run() {
  while (!closing_) {
    if (const int milliseconds = sleep_ms(); milliseconds > 0) {
      epoll_event event;
      (void)epoll_wait(epoll_, &event, 1, milliseconds);
    } else {
      while (waiting_ > 0) sched_yield();
    }
  }
}

}  // namespace kvferry
