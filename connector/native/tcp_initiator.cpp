#include "tcp_initiator.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace kvferry {

namespace {

// Sent by the posting thread; larger ones would keep the owner's loop.
constexpr int64_t kAtOnceBytes = 256 << 10;
constexpr int64_t kLookedForBytes = 64 << 10;
constexpr int64_t kBatchesNotWorth = 32;
constexpr double kUnansweredS = 30;

}  // namespace

int64_t TcpInitiator::connect(int fd, const Secret& secret, std::vector<int64_t> region_bytes, double timeout_s) {
  auto peer = std::make_unique<Peer>(fd);
  peer->socket.tune();
  peer->socket.give_up_after(kUnansweredS);
  peer->region_bytes = std::move(region_bytes);
  peer->connect_timeout_s = timeout_s;
  peer->connect_deadline = after(timeout_s);
  peer->wanted = Scatter::whole(&peer->reply, sizeof(Reply));
  const Hello hello{kHelloMagic, secret};
  std::vector<char> head(sizeof hello);
  std::memcpy(head.data(), &hello, sizeof hello);
  peer->requests.emplace_back(std::move(head), Scatter{});
  peer->watched = EPOLLOUT | EPOLLRDHUP;
  const int64_t id = next_peer_++;
  poller_.add(fd, Watched::kPeer, id, peer->watched);
  earliest_ = std::min(earliest_, peer->connect_deadline);
  peers_[id] = std::move(peer);
  return id;
}

int64_t TcpInitiator::region_bytes(int64_t id, int64_t region) const {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->late)
    throw std::runtime_error("peer " + std::to_string(id) + " is down, fenced or unknown; connect to it again");
  const auto& regions = found->second->region_bytes;
  if (region < 0 || static_cast<size_t>(region) >= regions.size())
    throw OutOfBounds("remote region " + std::to_string(region) + " of " + std::to_string(regions.size()) +
                      ": there is no such region; nothing was posted");
  return regions[static_cast<size_t>(region)];
}

int64_t TcpInitiator::post(int64_t id, bool write, char* local, int64_t region, const std::vector<Run>& runs,
                           double timeout_s) {
  const auto deadline = after(timeout_s);
  Peer& peer = *peers_.at(id);
  const int64_t number = next_batch_++;
  if (runs.empty()) {
    events_.push({EventKind::kCompleted, id, number, ""});
    return number;
  }
  constexpr size_t most = kMostPieces;
  const auto requests = static_cast<int64_t>((runs.size() + most - 1) / most);
  peer.batches.push_back({number, write, total_bytes(runs), timeout_s, deadline, requests});
  const Batch& batch = peer.batches.back();
  const bool idle = peer.connected && peer.requests.empty();
  for (size_t first = 0; first < runs.size(); first += most)
    request(peer, batch, local, region, runs.data() + first, std::min(most, runs.size() - first));
  earliest_ = std::min(earliest_, deadline);
  if (idle && (!write || batch.bytes <= kAtOnceBytes)) {
    const Going going = send(peer);
    if (going != Going::kOn) {
      end(id, going);
      return number;
    }
    if (peer.batches.size() == 1 && batch.bytes <= kLookedForBytes) peer.looked_at = --peer.not_worth < 0;
  }
  watch(id, peer);
  return number;
}

void TcpInitiator::request(Peer& peer, const Batch& batch, char* local, int64_t region, const Run* runs, size_t count) {
  std::vector<Piece> here, there;
  int64_t bytes = 0;
  // Either side is one stream, so that neighbours need to be adjacent on that side only.
  for (size_t i = 0; i < count; ++i) {
    append(here, runs[i].local, runs[i].length);
    append(there, runs[i].remote, runs[i].length);
    bytes += runs[i].length;
  }
  const Request request{kRequestMagic, batch.write ? Asked::kWrite : Asked::kRead, batch.id,
                        region,        static_cast<int64_t>(there.size()),         bytes};
  std::vector<char> head(sizeof request + there.size() * sizeof(Piece));
  std::memcpy(head.data(), &request, sizeof request);
  std::memcpy(head.data() + sizeof request, there.data(), there.size() * sizeof(Piece));
  Scatter memory(local, std::move(here));
  if (batch.write) {
    peer.answers.push_back({0, {}});
    peer.requests.emplace_back(std::move(head), std::move(memory));
  } else {
    peer.answers.push_back({bytes, std::move(memory)});
    peer.requests.emplace_back(std::move(head), Scatter{});
  }
}

void TcpInitiator::serve(int64_t id, uint32_t events) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  Going going = Going::kOn;
  if (!peer.connected && events & EPOLLOUT) peer.connected = (events & (EPOLLERR | EPOLLHUP)) == 0;
  if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) going = receive(id, peer);
  if (going == Going::kOn && peer.connected) going = send(peer);
  if (going != Going::kOn)
    end(id, going);
  else
    watch(id, peer);
}

bool TcpInitiator::worth_looking(int64_t id) const {
  const auto found = peers_.find(id);
  return found != peers_.end() && found->second->looked_at;
}

bool TcpInitiator::look(int64_t id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return true;
  const Going going = receive(id, *found->second);
  if (going != Going::kOn) end(id, going);
  return going != Going::kOn || found->second->batches.empty();
}

void TcpInitiator::look_away(int64_t id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  peer.looked_at = false;
  peer.not_worth = peer.batches.empty() ? 0 : kBatchesNotWorth;
  watch(id, peer);
}

TcpInitiator::Going TcpInitiator::receive(int64_t id, Peer& peer) {
  for (size_t moved = 0; moved < 8 || peer.socket.has_kept(); ++moved) {
    switch (peer.socket.receive(peer.wanted)) {
      case Moved::kAll: {
        const Going going = advance(id, peer);
        if (going != Going::kOn) return going;
        break;
      }
      case Moved::kSome:
        if (!peer.socket.has_kept()) return Going::kOn;
        break;
      case Moved::kNone:
        return Going::kOn;
      case Moved::kEnded:
        return Going::kEnded;
      case Moved::kFailed:
        return Going::kFailed;
    }
  }
  return Going::kOn;
}

TcpInitiator::Going TcpInitiator::advance(int64_t id, Peer& peer) {
  if (!peer.in_bytes) {
    if (peer.answers.empty() || peer.reply.magic != kReplyMagic || peer.reply.status != Status::kDone ||
        peer.reply.batch != peer.batches.front().id || peer.reply.bytes != peer.answers.front().bytes)
      return Going::kRefused;
    if (peer.reply.bytes > 0) {
      peer.in_bytes = true;
      peer.wanted = std::move(peer.answers.front().into);
      return Going::kOn;
    }
  }
  answered(id, peer);
  return Going::kOn;
}

void TcpInitiator::answered(int64_t id, Peer& peer) {
  peer.in_bytes = false;
  peer.wanted = Scatter::whole(&peer.reply, sizeof(Reply));
  peer.answers.pop_front();
  if (--peer.batches.front().unanswered > 0) return;
  events_.push({EventKind::kCompleted, id, peer.batches.front().id, ""});
  peer.batches.pop_front();
}

TcpInitiator::Going TcpInitiator::send(Peer& peer) {
  while (!peer.requests.empty()) {
    Message& message = peer.requests.front();
    switch (peer.socket.send(message.head, message.body)) {
      case Moved::kAll:
        peer.requests.pop_front();
        break;
      case Moved::kSome:
      case Moved::kNone:
        return Going::kOn;
      case Moved::kEnded:
        return Going::kEnded;
      case Moved::kFailed:
        return Going::kFailed;
    }
  }
  return Going::kOn;
}

void TcpInitiator::watch(int64_t id, Peer& peer) {
  const bool sends = !peer.connected || !peer.requests.empty();
  const bool receives = !peer.batches.empty() && !peer.looked_at;
  const uint32_t wanted = EPOLLRDHUP | (sends ? EPOLLOUT : 0u) | (receives ? EPOLLIN : 0u);
  if (wanted == peer.watched) return;
  poller_.change(peer.socket.fd(), Watched::kPeer, id, wanted);
  peer.watched = wanted;
}

void TcpInitiator::end(int64_t id, Going going) {
  const int error = errno;
  switch (going) {
    case Going::kOn:
      return;
    case Going::kEnded:
      return end(id, EventKind::kLost, "it has closed its connection, or its process has ended");
    case Going::kRefused:
      return end(id, EventKind::kLate,
                 "it has refused a request that it should have served, or does not speak this protocol");
    case Going::kFailed:
      return end(id, EventKind::kLate, std::string("its connection has failed: ") + std::strerror(error));
  }
}

void TcpInitiator::end(int64_t id, EventKind kind, const std::string& cause) {
  const bool told = peers_.at(id)->late;
  close(id, cause);
  lost_.insert(id);
  if (!told) events_.push({kind, id, -1, cause});
}

void TcpInitiator::lose(int64_t id, const std::string& cause) {
  if (peers_.count(id) > 0) end(id, EventKind::kLate, cause);
}

void TcpInitiator::close(int64_t id, const std::string& error) {
  const std::unique_ptr<Peer> peer = std::move(peers_.at(id));
  peers_.erase(id);
  poller_.remove(peer->socket.fd());
  peer->socket.reset_on_close();
  for (const Batch& batch : peer->batches) events_.push({EventKind::kCompleted, id, batch.id, error});
}

void TcpInitiator::fence(int64_t id) {
  if (peers_.count(id) > 0)
    close(id, "the peer was fenced");
  else if (lost_.erase(id) == 0)
    return;
  events_.push({EventKind::kFenced, id, -1, ""});
}

void TcpInitiator::close() {
  while (!peers_.empty()) fence(peers_.begin()->first);
}

void TcpInitiator::on_time(Clock::time_point now) {
  if (now < earliest_) return;
  earliest_ = Clock::time_point::max();
  for (auto& [id, peer] : peers_) {
    if (peer->late) continue;
    if (!peer->connected) {
      earliest_ = std::min(earliest_, peer->connect_deadline);
      if (now >= peer->connect_deadline) {
        std::ostringstream text;
        text << "it could not be connected to within " << peer->connect_timeout_s << " s";
        tell_late(id, *peer, text.str());
        continue;
      }
    }
    for (const Batch& batch : peer->batches) {
      earliest_ = std::min(earliest_, batch.deadline);
      if (now < batch.deadline) continue;
      tell_late(id, *peer, lateness(batch.id, batch.write, batch.bytes, batch.timeout_s));
      break;
    }
  }
}

void TcpInitiator::tell_late(int64_t id, Peer& peer, const std::string& text) {
  peer.late = true;
  events_.push({EventKind::kLate, id, -1, text});
}

}  // namespace kvferry
