#include "tcp_socket.hpp"

#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvferry {

namespace {

// While more than twice as much is to come, it is not worth being woken for less: without this every packet of a sender
// wakes the receiver, which costs both of them. Where the socket's memory is short the kernel wakes earlier.
constexpr size_t kWakeBytes = 128 << 10;

bool is_end(int error) { return error == ECONNRESET || error == EPIPE || error == ECONNREFUSED; }

Moved failure() {
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return Moved::kNone;
  return is_end(errno) ? Moved::kEnded : Moved::kFailed;
}

void set(int fd, int level, int option, int value) { (void)setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

Socket::Socket(int fd) : fd_(fd) { (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

Socket::~Socket() { ::close(fd_); }

void Socket::tune() {
  set(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that has gone silent is noticed after about half a minute, in which nothing is sent either.
  set(fd_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd_, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(fd_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(fd_, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

void Socket::give_up_after(double seconds) { set(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(seconds * 1e3)); }

int Socket::error() const {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) < 0 ? errno : error;
}

void Socket::reset_on_close() {
  const linger now{1, 0};
  (void)setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

void Socket::wake_for(size_t wanted) {
  const size_t least = wanted >= 2 * kWakeBytes ? kWakeBytes : 1;
  if (least == woken_for_) return;
  woken_for_ = least;
  set(fd_, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(least));
}

Moved Socket::receive(Scatter& wanted) {
  const Moved moved = receive_into(wanted);
  const int error = errno;
  wake_for(wanted.left());
  errno = error;
  return moved;
}

Moved Socket::receive_into(Scatter& wanted) {
  iovec parts[IOV_MAX];
  size_t count = wanted.next(parts, IOV_MAX - 1, kStepBytes);
  if (has_kept()) {
    size_t taken = 0;
    for (size_t i = 0; i < count && has_kept(); ++i) {
      const size_t bytes = std::min(parts[i].iov_len, end_ - begin_);
      std::memcpy(parts[i].iov_base, kept_.data() + begin_, bytes);
      begin_ += bytes;
      taken += bytes;
    }
    wanted.advance(taken);
    return wanted.done() ? Moved::kAll : Moved::kSome;
  }
  size_t asked = 0;
  for (size_t i = 0; i < count; ++i) asked += parts[i].iov_len;
  const bool keeps = asked < kStepBytes && count < IOV_MAX - 1;
  const size_t room = keeps ? kept_.size() : 0;
  if (keeps) parts[count++] = {kept_.data(), room};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got < 0) return failure();
  if (got == 0) return Moved::kEnded;
  const auto bytes = static_cast<size_t>(got);
  wanted.advance(std::min(bytes, asked));
  begin_ = 0;
  end_ = bytes - std::min(bytes, asked);
  if (wanted.done()) return Moved::kAll;
  return bytes < asked ? Moved::kNone : Moved::kSome;
}

Moved Socket::send(Scatter& head, Scatter& body) {
  iovec parts[IOV_MAX];
  const size_t first = head.next(parts, 1, kStepBytes);
  const size_t head_bytes = first > 0 ? parts[0].iov_len : 0;
  const size_t count = first + body.next(parts + first, IOV_MAX - first, kStepBytes - head_bytes);
  size_t asked = 0;
  for (size_t i = 0; i < count; ++i) asked += parts[i].iov_len;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t gone = ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (gone < 0) return failure();
  const auto bytes = static_cast<size_t>(gone);
  head.advance(std::min(bytes, head_bytes));
  body.advance(bytes - std::min(bytes, head_bytes));
  if (head.done() && body.done()) return Moved::kAll;
  return bytes < asked ? Moved::kNone : Moved::kSome;
}

}  // namespace kvferry
