#include "tcp_target.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvferry {

namespace {

constexpr double kHelloS = 5;
constexpr size_t kMostStrangers = 64;
// Enough to keep the stream busy; beyond that an initiator waits before it is listened to again.
constexpr size_t kMostReplies = 64;
constexpr double kNoDescriptorsS = 0.1;

}  // namespace

TcpTarget::TcpTarget(Poller& poller, int listener, const Secret& secret, const std::vector<LocalRegion>& regions)
    : poller_(poller), listener_(std::make_unique<Socket>(listener)), secret_(secret), regions_(regions) {
  poller_.add(listener_->fd(), Watched::kListener, 0, EPOLLIN);
}

void TcpTarget::accept() {
  const int fd = ::accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    // The listener would be reported again at once, for as long as nobody gives a descriptor back.
    poller_.change(listener_->fd(), Watched::kListener, 0, 0);
    accept_again_ = after(kNoDescriptorsS);
    return;
  }
  auto connection = std::make_unique<Connection>(fd);
  connection->socket.tune();
  connection->wanted = Scatter::whole(&connection->hello, sizeof(Hello));
  connection->deadline = after(kHelloS);
  connection->watched = EPOLLIN | EPOLLRDHUP;
  const int64_t id = next_++;
  poller_.add(fd, Watched::kServed, id, connection->watched);
  connections_[id] = std::move(connection);
  while (!strangers_.empty()) {
    const auto found = connections_.find(strangers_.front());
    const bool stranger = found != connections_.end() && found->second->awaits == Awaits::kHello;
    if (stranger && strangers_.size() < kMostStrangers) break;
    if (stranger) drop(strangers_.front());
    strangers_.pop_front();
  }
  strangers_.push_back(id);
}

void TcpTarget::serve(int64_t id, uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  // An initiator that has closed its end wants nothing more: what it wrote before, and was not told of, must not land.
  bool keep = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0;
  do {
    keep = keep && receive(connection) && send(connection);
    // Requests that have been received already are no news to epoll.
  } while (keep && connection.socket.has_kept() && can_receive(connection));
  if (keep)
    watch(id, connection);
  else
    drop(id);
}

void TcpTarget::drop(int64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  poller_.remove(found->second->socket.fd());
  connections_.erase(found);
}

void TcpTarget::close() {
  while (!connections_.empty()) drop(connections_.begin()->first);
  if (listener_) poller_.remove(listener_->fd());
  listener_.reset();
}

void TcpTarget::on_time(Clock::time_point now) {
  if (now >= accept_again_) {
    accept_again_ = Clock::time_point::max();
    poller_.change(listener_->fd(), Watched::kListener, 0, EPOLLIN);
  }
  while (!strangers_.empty()) {
    const auto found = connections_.find(strangers_.front());
    if (found != connections_.end() && found->second->awaits == Awaits::kHello) {
      if (found->second->deadline > now) return;
      drop(strangers_.front());
    }
    strangers_.pop_front();
  }
}

Clock::time_point TcpTarget::next_time() const {
  auto next = accept_again_;
  if (strangers_.empty()) return next;
  const auto found = connections_.find(strangers_.front());
  return found == connections_.end() ? Clock::time_point::min() : std::min(next, found->second->deadline);
}

bool TcpTarget::can_receive(const Connection& connection) const {
  return connection.replies.size() < kMostReplies && !connection.refused;
}

bool TcpTarget::receive(Connection& connection) {
  for (size_t moved = 0; moved < 8 && can_receive(connection);) {
    switch (connection.socket.receive(connection.wanted)) {
      case Moved::kAll:
        if (!advance(connection)) return false;
        break;
      case Moved::kSome:
        // So that others are served, and a connection that was closed meanwhile is noticed.
        if (!connection.socket.has_kept()) return true;
        break;
      case Moved::kNone:
        return true;
      case Moved::kEnded:
      case Moved::kFailed:
        return false;
    }
    if (!connection.socket.has_kept()) ++moved;
  }
  return true;
}

bool TcpTarget::advance(Connection& connection) {
  switch (connection.awaits) {
    case Awaits::kHello:
      if (connection.hello.magic != kHelloMagic || !equal(connection.hello.secret, secret_)) return false;
      await_request(connection);
      return true;
    case Awaits::kRequest:
      if (connection.request.magic != kRequestMagic) return false;
      if (connection.request.pieces <= 0 || connection.request.pieces > kMostPieces) return false;
      connection.pieces.resize(static_cast<size_t>(connection.request.pieces));
      connection.awaits = Awaits::kPieces;
      connection.wanted = Scatter::whole(connection.pieces.data(), connection.pieces.size() * sizeof(Piece));
      return true;
    case Awaits::kPieces:
      return start(connection);
    case Awaits::kBytes:
      reply(connection, Status::kDone, {}, 0);
      await_request(connection);
      return true;
  }
  return false;
}

bool TcpTarget::start(Connection& connection) {
  if (!acceptable(connection)) {
    reply(connection, Status::kRefused, {}, 0);
    connection.refused = true;
    return true;
  }
  Scatter bytes(regions_[static_cast<size_t>(connection.request.region)].address, std::move(connection.pieces));
  if (connection.request.asked == Asked::kRead) {
    reply(connection, Status::kDone, std::move(bytes), connection.request.bytes);
    await_request(connection);
  } else {
    connection.awaits = Awaits::kBytes;
    connection.wanted = std::move(bytes);
  }
  return true;
}

bool TcpTarget::acceptable(const Connection& connection) const {
  const Request& request = connection.request;
  if (request.asked != Asked::kRead && request.asked != Asked::kWrite) return false;
  if (request.region < 0 || static_cast<size_t>(request.region) >= regions_.size()) return false;
  const int64_t room = regions_[static_cast<size_t>(request.region)].bytes;
  uint64_t total = 0;  // of at most kMostPieces lengths below 2^63 / kMostPieces: regions are no longer than 2^47 bytes
  for (const Piece& piece : connection.pieces) {
    if (piece.offset < 0 || piece.length <= 0 || piece.length > room || piece.offset > room - piece.length)
      return false;
    total += static_cast<uint64_t>(piece.length);
  }
  return request.bytes >= 0 && total == static_cast<uint64_t>(request.bytes);
}

void TcpTarget::await_request(Connection& connection) {
  connection.awaits = Awaits::kRequest;
  connection.wanted = Scatter::whole(&connection.request, sizeof(Request));
}

void TcpTarget::reply(Connection& connection, Status status, Scatter body, int64_t bytes) {
  const Reply reply{kReplyMagic, status, connection.request.batch, bytes};
  std::vector<char> head(sizeof reply);
  std::memcpy(head.data(), &reply, sizeof reply);
  connection.replies.emplace_back(std::move(head), std::move(body));
}

bool TcpTarget::send(Connection& connection) {
  while (!connection.replies.empty()) {
    Message& message = connection.replies.front();
    switch (connection.socket.send(message.head, message.body)) {
      case Moved::kAll:
        connection.replies.pop_front();
        break;
      case Moved::kSome:
      case Moved::kNone:
        return true;
      case Moved::kEnded:
      case Moved::kFailed:
        return false;
    }
  }
  return !connection.refused;
}

void TcpTarget::watch(int64_t id, Connection& connection) {
  uint32_t wanted = EPOLLRDHUP;
  if (can_receive(connection)) wanted |= EPOLLIN;
  if (!connection.replies.empty()) wanted |= EPOLLOUT;
  if (wanted == connection.watched) return;
  poller_.change(connection.socket.fd(), Watched::kServed, id, wanted);
  connection.watched = wanted;
}

}  // namespace kvferry
