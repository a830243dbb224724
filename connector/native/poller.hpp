// epoll, and names for what is watched: numbers are never used twice, so that a late event finds nobody.
#pragma once

#include <sys/epoll.h>

#include <cstdint>

namespace kvferry {

enum class Watched : uint64_t { kWake, kListener, kServed, kPeer };

class Poller {
 public:
  Poller();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Throws std::system_error when the kernel refuses.
  void add(int fd, Watched kind, int64_t number, uint32_t events);
  void change(int fd, Watched kind, int64_t number, uint32_t events);
  void remove(int fd);
  // How many of `events` happened; negative timeouts wait for ever.
  int wait(epoll_event* events, int count, int timeout_ms);
  // Makes `wait` return, now or the next time.
  void wake();
  void awake();

  static Watched kind(const epoll_event& event) { return static_cast<Watched>(event.data.u64 >> 56); }
  static int64_t number(const epoll_event& event) { return static_cast<int64_t>(event.data.u64 & ((1ULL << 56) - 1)); }

 private:
  void control(int operation, int fd, Watched kind, int64_t number, uint32_t events);

  int epoll_;
  int wake_;
};

}  // namespace kvferry
