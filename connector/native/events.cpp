#include "events.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvferry {

EventQueue::EventQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EventQueue::~EventQueue() { ::close(fd_); }

void EventQueue::push(Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
  // Cannot fail: the counter is reset by every drain and cannot come near its maximum.
  (void)eventfd_write(fd_, 1);
}

std::vector<Event> EventQueue::drain() {
  std::lock_guard<std::mutex> lock(mutex_);
  eventfd_t ignored;
  (void)eventfd_read(fd_, &ignored);  // EAGAIN when nothing was pushed
  std::vector<Event> drained;
  drained.swap(events_);
  return drained;
}

}  // namespace kvferry
