// The end of data connections that asks: it posts batches to peers and tells what became of them.
//
// A batch is one request, or several when it has very many pieces. Requests are answered in order, so that the first
// one that is not answered says where the next bytes go. Small ones are sent by the thread that posts them, which saves
// a switch of threads.
//
// A batch that misses its deadline stays in flight, and its peer is told of as late, once; the owner then fences it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "deadline.hpp"
#include "events.hpp"
#include "poller.hpp"
#include "runs.hpp"
#include "tcp_socket.hpp"
#include "tcp_wire.hpp"

namespace kvferry {

class TcpInitiator {
 public:
  TcpInitiator(Poller& poller, EventQueue& events) : poller_(poller), events_(events) {}

  // Owns `fd`, a socket that is connected or about to be, which has to happen within `timeout_s`.
  int64_t connect(int fd, const Secret& secret, std::vector<int64_t> region_bytes, double timeout_s);
  // Throws std::runtime_error unless the peer is connected to and not known to be down, OutOfBounds for no such region.
  int64_t region_bytes(int64_t peer, int64_t region) const;
  // `runs` lie within `local` and the peer's region; the peer is one that `region_bytes` knows.
  int64_t post(int64_t peer, bool write, char* local, int64_t region, const std::vector<Run>& runs, double timeout_s);
  void serve(int64_t peer, uint32_t events);
  // Whether the poster should call `look` for a while, and `look_away` in the end; nobody else receives until then.
  bool worth_looking(int64_t peer) const;
  // Receives what is there; whether there is nothing left to look for.
  bool look(int64_t peer);
  void look_away(int64_t peer);
  // Closes the connection. Its batches end with an error; nothing of it touches memory any more, and an event says so.
  // Unknown and fenced peers are left alone.
  void fence(int64_t peer);
  void lose(int64_t peer, const std::string& cause);
  void close();
  void on_time(Clock::time_point now);
  Clock::time_point next_time() const { return earliest_; }

 private:
  struct Batch {
    int64_t id;
    bool write;
    int64_t bytes;
    double timeout_s;
    Clock::time_point deadline;
    int64_t unanswered;
  };
  struct Answer {  // that is awaited, and where its bytes go
    int64_t bytes;
    Scatter into;
  };
  struct Peer {
    explicit Peer(int fd) : socket(fd) {}
    Socket socket;
    std::vector<int64_t> region_bytes;
    bool connected = false;
    Clock::time_point connect_deadline;
    double connect_timeout_s;
    std::deque<Message> requests;
    std::deque<Batch> batches;
    std::deque<Answer> answers;
    Reply reply;
    Scatter wanted;
    bool in_bytes = false;  // the reply has come, and its bytes follow
    bool late = false;
    bool looked_at = false;  // by the poster
    int64_t not_worth = 0;   // so many batches are not looked for, because an answer took too long
    uint32_t watched = 0;
  };
  enum class Going { kOn, kEnded, kRefused, kFailed };

  Going receive(int64_t id, Peer& peer);
  Going advance(int64_t id, Peer& peer);
  Going send(Peer& peer);
  void request(Peer& peer, const Batch& batch, char* local, int64_t region, const Run* runs, size_t count);
  void answered(int64_t id, Peer& peer);
  void end(int64_t id, Going going);
  void end(int64_t id, EventKind kind, const std::string& cause);
  void close(int64_t id, const std::string& error);
  void tell_late(int64_t id, Peer& peer, const std::string& text);
  void watch(int64_t id, Peer& peer);

  Poller& poller_;
  EventQueue& events_;
  std::map<int64_t, std::unique_ptr<Peer>> peers_;
  std::set<int64_t> lost_;                                 // peers whose connection has ended, not fenced yet
  Clock::time_point earliest_ = Clock::time_point::max();  // nothing is late before this
  int64_t next_peer_ = 0;
  int64_t next_batch_ = 0;
};

}  // namespace kvferry
