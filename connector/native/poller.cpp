#include "poller.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvferry {

Poller::Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const int error = errno;
  if (epoll_ >= 0 && wake_ >= 0) {
    add(wake_, Watched::kWake, 0, EPOLLIN);
    return;
  }
  if (epoll_ >= 0) ::close(epoll_);
  if (wake_ >= 0) ::close(wake_);
  throw std::system_error(error, std::generic_category(), "epoll or eventfd");
}

Poller::~Poller() {
  ::close(epoll_);
  ::close(wake_);
}

void Poller::control(int operation, int fd, Watched kind, int64_t number, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<uint64_t>(kind) << 56 | static_cast<uint64_t>(number);
  if (epoll_ctl(epoll_, operation, fd, &event) < 0)
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

void Poller::add(int fd, Watched kind, int64_t number, uint32_t events) {
  control(EPOLL_CTL_ADD, fd, kind, number, events);
}

void Poller::change(int fd, Watched kind, int64_t number, uint32_t events) {
  control(EPOLL_CTL_MOD, fd, kind, number, events);
}

void Poller::remove(int fd) { (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

int Poller::wait(epoll_event* events, int count, int timeout_ms) {
  return epoll_wait(epoll_, events, count, timeout_ms);
}

void Poller::wake() { (void)eventfd_write(wake_, 1); }

void Poller::awake() {
  eventfd_t ignored;
  (void)eventfd_read(wake_, &ignored);
}

}  // namespace kvferry
