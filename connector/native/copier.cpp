#include "copier.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "stream.hpp"

namespace kvferry {

namespace {

// Small enough that a fence waits for well under a millisecond, large enough to cost nothing.
constexpr int64_t kPieceBytes = 1 << 20;
// Measured: up to here the copy takes less time than waking a thread, being woken by it, and the copy there. It keeps
// an event loop for a quarter of a millisecond at most.
constexpr int64_t kAtOnceBytes = 2 << 20;
constexpr int64_t kShareBytes = 1 << 20;  // less is not worth another thread
constexpr unsigned kMostThreads = 4;
constexpr int64_t kTouchBytes = 2 << 20;
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // since Linux 5.14
#endif

bool has_ended(int pidfd) {
  pollfd watched{pidfd, POLLIN, 0};
  return ::poll(&watched, 1, 0) > 0;
}

// A function of its own, so that the sanitizers can tell the user's bytes, which batches in flight at once may race
// for, from the copier's own memory.
__attribute__((noinline)) void move_bytes(char* to, const char* from, size_t bytes, bool streaming) {
  if (streaming)
    copy_streaming(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

// The runs in `shares` parts of about as many bytes each; a run may be cut.
std::vector<std::vector<Run>> divided(std::vector<Run> runs, int64_t bytes, int64_t shares) {
  std::vector<std::vector<Run>> parts(static_cast<size_t>(shares));
  if (shares == 1) {
    parts[0] = std::move(runs);
    return parts;
  }
  const int64_t most = (bytes + shares - 1) / shares;
  size_t part = 0;
  int64_t room = most;
  for (Run run : runs) {
    while (run.length > room) {
      if (room > 0) parts[part].push_back({run.local, run.remote, room});
      run = {run.local + room, run.remote + room, run.length - room};
      ++part;
      room = most;
    }
    parts[part].push_back(run);
    room -= run.length;
  }
  return parts;
}

}  // namespace

Copier::Copier(std::string name) : name_(std::move(name)) {
  const unsigned cores = std::clamp(std::thread::hardware_concurrency(), 1U, kMostThreads);
  for (unsigned i = 0; i < cores; ++i) {
    threads_.emplace_back([this] { run(); });
    pthread_setname_np(threads_.back().native_handle(), name_.substr(0, 15).c_str());
  }
}

Copier::~Copier() { close(); }

int64_t Copier::add_peer(int pidfd, std::vector<std::pair<char*, int64_t>> mapped) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto peer = std::make_shared<Peer>();
  peer->pidfd = pidfd;
  peer->untouched = std::move(mapped);
  peers_[next_peer_] = std::move(peer);
  work_.notify_one();
  return next_peer_++;
}

std::shared_ptr<Copier::Peer> Copier::find(int64_t peer) {
  auto found = peers_.find(peer);
  if (closing_ || found == peers_.end())
    throw std::runtime_error("peer " + std::to_string(peer) + " is fenced or unknown; connect to it again");
  return found->second;
}

int64_t Copier::post(int64_t peer, bool write, char* local, char* remote, std::vector<Run> runs, double timeout_s) {
  const auto deadline = after(timeout_s);
  const int64_t bytes = total_bytes(runs);
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t id = next_batch_;
  auto whole = std::make_shared<Whole>(Whole{1, bytes, ""});
  Batch batch{id, peer, find(peer), write, local, remote, std::move(runs), timeout_s, deadline, std::move(whole)};
  ++next_batch_;
  ++batch.peer->out;
  if (bytes <= kAtOnceBytes && batch.peer->out == 1) {
    carry_out(batch, lock);
    return id;
  }
  earliest_ = std::min(earliest_, deadline);
  const int64_t shares = std::clamp<int64_t>(bytes / kShareBytes, 1, static_cast<int64_t>(threads_.size()));
  batch.whole->left = shares;
  for (std::vector<Run>& share : divided(std::move(batch.runs), bytes, shares)) {
    queue_.push_back(batch);
    queue_.back().runs = std::move(share);
    work_.notify_one();
  }
  return id;
}

void Copier::carry_out(const Batch& batch, std::unique_lock<std::mutex>& lock) {
  ++batch.peer->copying;
  lock.unlock();
  std::string error = copy(batch);
  end_streaming();
  lock.lock();
  --batch.peer->copying;
  end(batch, std::move(error));
  finish_fence(batch.peer_id, *batch.peer);
}

void Copier::end(const Batch& batch, std::string error) {
  Whole& whole = *batch.whole;
  if (whole.error.empty()) whole.error = std::move(error);
  if (--whole.left > 0) return;
  --batch.peer->out;
  events_.push({EventKind::kCompleted, batch.peer_id, batch.id, std::move(whole.error)});
}

void Copier::fence(int64_t peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  start_fence(peer);
}

void Copier::start_fence(int64_t id) {
  auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const std::shared_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  peer->fenced = true;
  std::deque<Batch> kept;
  for (auto& batch : queue_) {
    if (batch.peer_id == id)
      end(batch, "the peer was fenced");
    else
      kept.push_back(std::move(batch));
  }
  queue_.swap(kept);
  ++fencing_;
  finish_fence(id, *peer);
}

void Copier::finish_fence(int64_t id, const Peer& peer) {
  if (!peer.fenced || peer.copying > 0) return;
  events_.push({EventKind::kFenced, id, -1, ""});
  --fencing_;
  idle_.notify_all();
}

void Copier::close() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
    while (!peers_.empty()) start_fence(peers_.begin()->first);
    idle_.wait(lock, [&] { return fencing_ == 0; });
    work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Copier::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (closing_) return;
    if (queue_.empty()) {
      if (!touch_some(lock)) work_.wait(lock);
      continue;
    }
    Batch batch = std::move(queue_.front());
    queue_.pop_front();
    carry_out(batch, lock);
  }
}

bool Copier::touch_some(std::unique_lock<std::mutex>& lock) {
  for (auto& [id, found] : peers_) {
    if (found->untouched.empty()) continue;
    const int64_t peer_id = id;
    const std::shared_ptr<Peer> peer = found;
    auto& [address, left] = peer->untouched.back();
    char* const start = address;
    const int64_t bytes = std::min(left, kTouchBytes);
    address += bytes;
    left -= bytes;
    if (left == 0) peer->untouched.pop_back();
    ++peer->copying;
    lock.unlock();
    const bool touched = ::madvise(start, static_cast<size_t>(bytes), MADV_POPULATE_READ) == 0;
    lock.lock();
    if (!touched) peer->untouched.clear();  // an older kernel, or no memory: then pages are touched when they are used
    --peer->copying;
    finish_fence(peer_id, *peer);
    return true;
  }
  return false;
}

bool Copier::is_late(const Batch& batch) {
  const auto now = Clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  if (now >= earliest_) {
    earliest_ = Clock::time_point::max();
    std::deque<Batch> kept;
    for (auto& queued : queue_) {
      if (now >= queued.deadline) {
        end(queued, tell_late(queued));
        continue;
      }
      earliest_ = std::min(earliest_, queued.deadline);
      kept.push_back(std::move(queued));
    }
    queue_.swap(kept);
  }
  return now >= batch.deadline;
}

std::string Copier::tell_late(const Batch& batch) {
  std::string text = lateness(batch.id, batch.write, batch.whole->bytes, batch.timeout_s);
  if (!batch.peer->late && !batch.peer->fenced) events_.push({EventKind::kLate, batch.peer_id, -1, text});
  batch.peer->late = true;
  return text;
}

std::string Copier::copy(const Batch& batch) {
  const bool streaming = batch.whole->bytes >= kStreamingBatchBytes;
  int64_t unchecked = kPieceBytes;
  for (const Run& run : batch.runs) {
    for (int64_t done = 0; done < run.length; done += kPieceBytes) {
      const int64_t bytes = std::min(kPieceBytes, run.length - done);
      if (unchecked + bytes > kPieceBytes) {
        unchecked = 0;
        if (batch.peer->fenced) return "the peer was fenced";
        if (is_late(batch)) {
          std::lock_guard<std::mutex> lock(mutex_);
          return tell_late(batch);
        }
      }
      unchecked += bytes;
      char* local = batch.local + run.local + done;
      char* remote = batch.remote + run.remote + done;
      char* to = batch.write ? remote : local;
      const char* from = batch.write ? local : remote;
      move_bytes(to, from, static_cast<size_t>(bytes), streaming && run.length >= kStreamingRunBytes);
    }
  }
  // The mapping outlives the process, so the copy itself never notices. A peer that has ended cannot have held its
  // blocks to the end, and nobody is left to hear of a write.
  if (has_ended(batch.peer->pidfd)) return "the peer's process has ended";
  return batch.peer->fenced ? "the peer was fenced" : "";
}

void copy_now(char* destination, const char* source, const std::vector<Run>& runs) {
  for (const Run& run : runs)
    std::memcpy(destination + run.local, source + run.remote, static_cast<size_t>(run.length));
}

}  // namespace kvferry
