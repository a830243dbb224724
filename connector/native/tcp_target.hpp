// The end of data connections whose memory is read and written: it carries out what initiators ask for.
//
// A connection has to give the secret first, soon. Only so many that have not are kept, the newest ones: a real peer
// says hello at once, so that strangers can fill the list without keeping anybody out. After the hello every piece of a
// request is checked before a byte of it moves; a request that leaves its region is refused, and its connection closed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "deadline.hpp"
#include "poller.hpp"
#include "tcp_socket.hpp"
#include "tcp_wire.hpp"

namespace kvferry {

struct LocalRegion {
  char* address;
  int64_t bytes;
};

class TcpTarget {
 public:
  // Owns `listener`, a listening socket. `regions` may grow.
  TcpTarget(Poller& poller, int listener, const Secret& secret, const std::vector<LocalRegion>& regions);

  void accept();
  void serve(int64_t connection, uint32_t events);
  // Closes it; nothing of it touches memory any more.
  void drop(int64_t connection);
  void close();
  // Whoever has not said hello in time is dropped, and accepting begins again where it had to stop.
  void on_time(Clock::time_point now);
  Clock::time_point next_time() const;

 private:
  enum class Awaits { kHello, kRequest, kPieces, kBytes };
  struct Connection {
    explicit Connection(int fd) : socket(fd) {}
    Socket socket;
    Awaits awaits = Awaits::kHello;
    Hello hello;
    Request request;
    std::vector<Piece> pieces;
    Scatter wanted;
    std::deque<Message> replies;
    bool refused = false;  // closes when its replies are sent
    uint32_t watched = 0;
    Clock::time_point deadline;  // of its hello
  };

  bool receive(Connection& connection);  // these: false when the connection has to go
  bool advance(Connection& connection);
  bool start(Connection& connection);
  bool send(Connection& connection);
  bool can_receive(const Connection& connection) const;
  bool acceptable(const Connection& connection) const;
  void await_request(Connection& connection);
  void reply(Connection& connection, Status status, Scatter body, int64_t bytes);
  void watch(int64_t id, Connection& connection);

  Poller& poller_;
  std::unique_ptr<Socket> listener_;
  const Secret secret_;
  const std::vector<LocalRegion>& regions_;
  std::map<int64_t, std::unique_ptr<Connection>> connections_;
  std::deque<int64_t> strangers_;  // those that have not said hello, or had not; oldest first
  Clock::time_point accept_again_ = Clock::time_point::max();
  int64_t next_ = 0;
};

}  // namespace kvferry
