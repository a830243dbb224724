// Copies between this process's pool and mapped pools of peers on the same host: small batches at once on the thread
// that posts them, which saves two switches of threads, and all others on a few native threads, which share large ones:
// one core copies no more than a part of what the memory can move.
//
// A copy cannot fail and cannot be recalled, but it can be stopped between two pieces: `fence` raises the peer's flag
// and drops what is queued; the event follows the piece that is being copied.
//
// Every batch has a deadline, looked at before each piece. It passes when this host is starved, or when another peer's
// copies are in the way; then the batch ends with an error, and its peer is told of as late, once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "deadline.hpp"
#include "events.hpp"
#include "runs.hpp"

namespace kvferry {

class Copier {
 public:
  explicit Copier(std::string name);
  ~Copier();

  // `pidfd` is the peer's process; it stays the caller's, and has to stay open until the peer is fenced, as its mapped
  // memory has to stay mapped. What is mapped is also touched, when there is nothing else to do: the first use of a
  // page would otherwise cost more than its copy.
  int64_t add_peer(int pidfd, std::vector<std::pair<char*, int64_t>> mapped);
  // Bytes move from `remote` to `local`, or the other way round for a write. Completes with an error when the peer's
  // process has ended, the peer is fenced, or `timeout_s` passes before the last byte has moved.
  int64_t post(int64_t peer, bool write, char* local, char* remote, std::vector<Run> runs, double timeout_s);
  // Nothing more is copied of this peer from the event that says so, which follows soon, and comes after the events of
  // its batches. Unknown and fenced peers are left alone.
  void fence(int64_t peer);
  // Fences every peer, and waits for it.
  void close();
  EventQueue& events() { return events_; }

 private:
  struct Peer {
    int pidfd;
    std::vector<std::pair<char*, int64_t>> untouched{};  // (address, bytes)
    std::atomic<bool> fenced{false};
    bool late = false;
    int64_t out = 0;      // batches that have no event yet
    int64_t copying = 0;  // those of them that are being copied
  };
  // What the shares of one batch have in common.
  struct Whole {
    int64_t left;  // shares that are not over
    int64_t bytes;
    std::string error;
  };
  // A batch, or a share of one.
  struct Batch {
    int64_t id;
    int64_t peer_id;
    std::shared_ptr<Peer> peer;
    bool write;
    char* local;
    char* remote;
    std::vector<Run> runs;
    double timeout_s;
    Clock::time_point deadline;
    std::shared_ptr<Whole> whole;
  };

  void run();
  // Touches some memory that has not been; false when there is none.
  bool touch_some(std::unique_lock<std::mutex>& lock);
  // Copies, and pushes the batch's event; the lock is released meanwhile.
  void carry_out(const Batch& batch, std::unique_lock<std::mutex>& lock);
  // A share is over; with the last one the batch is, and has its event.
  void end(const Batch& batch, std::string error);
  void start_fence(int64_t id);
  void finish_fence(int64_t id, const Peer& peer);
  std::string copy(const Batch& batch);
  // Whether the batch is late, or, as a side effect, which queued ones are.
  bool is_late(const Batch& batch);
  std::string tell_late(const Batch& batch);
  std::shared_ptr<Peer> find(int64_t peer);

  const std::string name_;
  EventQueue events_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::unordered_map<int64_t, std::shared_ptr<Peer>> peers_;
  std::deque<Batch> queue_;
  int64_t fencing_ = 0;                                    // peers whose fence waits for a piece
  Clock::time_point earliest_ = Clock::time_point::max();  // no queued batch is late before this
  int64_t next_peer_ = 0;
  int64_t next_batch_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

// Copies on the calling thread; the baseline that transports are measured against.
void copy_now(char* destination, const char* source, const std::vector<Run>& runs);

}  // namespace kvferry
