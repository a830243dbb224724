// What native threads have to tell the interpreter: a queue behind an eventfd.
//
// No native thread ever calls into Python. It pushes here, the descriptor becomes readable, and the owner's event loop
// drains the queue in its own time.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace kvferry {

// Either a batch that is terminal (batch >= 0; `error` empty when all of it succeeded) or a peer that is down (batch <
// 0).
struct Event {
  int64_t batch;
  int64_t peer;
  std::string error;
};

class EventQueue {
 public:
  EventQueue();
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void push(Event event);
  std::vector<Event> drain();
  int fileno() const { return fd_; }

 private:
  int fd_;
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace kvferry
