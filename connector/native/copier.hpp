// Copies between this process's pool and mapped pools of peers on the same host, on one native thread.
//
// A copy cannot fail and cannot be recalled, but it can be stopped between two pieces: `fence` raises the peer's flag,
// drops what is queued, and waits for the piece being copied.
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

#include "events.hpp"
#include "runs.hpp"

namespace kvferry {

class Copier {
 public:
  explicit Copier(std::string name);
  ~Copier();

  // `pidfd` is the peer's process; it stays the caller's, and has to stay open until the peer is fenced.
  int64_t add_peer(int pidfd);
  // Bytes move from `remote` to `local`, or the other way round for a write. Completes with an error when the peer's
  // process has ended or the peer is fenced before the last byte has moved.
  int64_t post(int64_t peer, bool write, char* local, char* remote, std::vector<Run> runs);
  // When it returns nothing of this peer is being copied, and each of its batches has its event.
  void fence(int64_t peer);
  void close();
  EventQueue& events() { return events_; }

 private:
  struct Peer {
    int pidfd;
    std::atomic<bool> fenced{false};
  };
  struct Batch {
    int64_t id;
    int64_t peer_id;
    std::shared_ptr<Peer> peer;
    bool write;
    char* local;
    char* remote;
    std::vector<Run> runs;
  };

  void run();
  std::string copy(const Batch& batch) const;
  std::shared_ptr<Peer> find(int64_t peer);

  const std::string name_;
  EventQueue events_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::unordered_map<int64_t, std::shared_ptr<Peer>> peers_;
  std::deque<Batch> queue_;
  int64_t copying_for_ = -1;
  int64_t next_peer_ = 0;
  int64_t next_batch_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

// Copies on the calling thread; the baseline that transports are measured against.
void copy_now(char* destination, const char* source, const std::vector<Run>& runs);

}  // namespace kvferry
