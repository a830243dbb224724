// Both ends of the tcp transport on one native thread, which sleeps in epoll while nothing happens.
//
// The thread holds the lock while it moves bytes, at most a few MiB at a time. So a fence that has the lock knows that
// nothing is being received, and closes the connection: there is nothing else that touches memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "events.hpp"
#include "poller.hpp"
#include "tcp_initiator.hpp"
#include "tcp_target.hpp"

namespace kvferry {

class TcpEngine {
 public:
  // Owns `listener`, a listening socket. `secret` has kSecretBytes.
  TcpEngine(const std::string& name, int listener, const std::string& secret);
  ~TcpEngine();

  int64_t register_memory(uintptr_t address, int64_t bytes);
  // Owns `fd`, a socket that is connected or about to be; the other end is a peer with `secret` and regions of so many
  // bytes. Throws std::runtime_error when this engine is closed.
  int64_t add_peer(int fd, const std::string& secret, std::vector<int64_t> region_bytes, double timeout_s);
  int64_t post(int64_t peer, bool write, int64_t local_region, int64_t remote_region, const int64_t* local,
               const int64_t* remote, const int64_t* length, size_t count, double timeout_s);
  // Closes the connection. When it returns, nothing of this peer touches memory any more, and its batches have had
  // their events. Unknown and fenced peers are left alone.
  void fence(int64_t peer);
  // Fences every peer and closes every connection; nothing touches memory any more.
  void close();
  EventQueue& events() { return events_; }

 private:
  std::unique_lock<std::mutex> turn();
  void run();
  void handle(const epoll_event& event);
  int sleep_ms();

  EventQueue events_;
  Poller poller_;
  std::mutex next_;   // held by whoever is next; otherwise the thread could take the lock again and again
  std::mutex mutex_;  // guards all below
  std::vector<LocalRegion> regions_;
  TcpTarget target_;
  TcpInitiator initiator_;
  Clock::time_point sleeps_until_ = Clock::time_point::max();
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace kvferry
