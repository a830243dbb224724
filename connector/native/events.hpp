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

enum class EventKind {
  kCompleted,  // a batch is terminal; `text` is its error, empty when all of it succeeded
  kLost,       // a peer cannot be reached any more; `text` says why
  kLate,       // a peer has not served a batch in time; `text` names it
  kFenced,     // no operation of a peer touches memory any more, and each of its batches has had its event
};

struct Event {
  EventKind kind;
  int64_t peer;
  int64_t batch;  // -1 when the event is the peer's
  std::string text;
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
