#include "tcp_engine.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace kvferry {

namespace {

// An answer that takes longer is waited for asleep.
constexpr std::chrono::microseconds kLook{50};

Secret as_secret(const std::string& text) {
  if (text.size() != kSecretBytes) throw std::invalid_argument("the secret has another length");
  Secret secret;
  std::memcpy(secret.data(), text.data(), kSecretBytes);
  return secret;
}

}  // namespace

TcpEngine::TcpEngine(const std::string& name, int listener, const std::string& secret)
    : target_(poller_, listener, as_secret(secret), regions_),
      initiator_(poller_, events_),
      thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

TcpEngine::~TcpEngine() { close(); }

std::unique_lock<std::mutex> TcpEngine::turn() {
  std::lock_guard<std::mutex> next(next_);
  return std::unique_lock<std::mutex>(mutex_);
}

int64_t TcpEngine::register_memory(uintptr_t address, int64_t bytes) {
  const auto lock = turn();
  regions_.push_back({reinterpret_cast<char*>(address), bytes});
  return static_cast<int64_t>(regions_.size()) - 1;
}

int64_t TcpEngine::add_peer(int fd, const std::string& secret, std::vector<int64_t> region_bytes, double timeout_s) {
  const auto lock = turn();
  if (closing_) {
    Socket closed(fd);
    throw std::runtime_error("this transport is closed");
  }
  const int64_t peer = initiator_.connect(fd, as_secret(secret), std::move(region_bytes), timeout_s);
  if (initiator_.next_time() < sleeps_until_) poller_.wake();
  return peer;
}

int64_t TcpEngine::post(int64_t peer, bool write, int64_t local_region, int64_t remote_region, const int64_t* local,
                        const int64_t* remote, const int64_t* length, size_t count, double timeout_s) {
  auto lock = turn();
  const int64_t remote_bytes = initiator_.region_bytes(peer, remote_region);
  if (local_region < 0 || static_cast<size_t>(local_region) >= regions_.size())
    throw OutOfBounds("local region " + std::to_string(local_region) + " of " + std::to_string(regions_.size()) +
                      ": there is no such region; nothing was posted");
  const LocalRegion& region = regions_[static_cast<size_t>(local_region)];
  const std::vector<Run> runs = checked_and_merged(local, remote, length, count, region.bytes, remote_bytes);
  const int64_t batch = initiator_.post(peer, write, region.address, remote_region, runs, timeout_s);
  if (!initiator_.worth_looking(peer)) {
    if (initiator_.next_time() < sleeps_until_) poller_.wake();
    return batch;
  }
  const auto until = Clock::now() + kLook;
  while (!initiator_.look(peer) && Clock::now() < until) {
    lock.unlock();  // the thread may have others to serve, and on this host the peer may want this core
    sched_yield();
    lock = turn();
  }
  initiator_.look_away(peer);
  if (initiator_.next_time() < sleeps_until_) poller_.wake();
  return batch;
}

void TcpEngine::fence(int64_t peer) {
  const auto lock = turn();
  initiator_.fence(peer);
}

void TcpEngine::close() {
  {
    const auto lock = turn();
    if (closing_) return;
    closing_ = true;
    initiator_.close();
    target_.close();
    poller_.wake();
  }
  thread_.join();
}

int TcpEngine::sleep_ms() {
  sleeps_until_ = std::min(initiator_.next_time(), target_.next_time());
  if (sleeps_until_ == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(sleeps_until_ - Clock::now()).count();
  // A day, so that the longest deadline fits; waking up early only means to look again.
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 86'400'000));
}

void TcpEngine::handle(const epoll_event& event) {
  const int64_t number = Poller::number(event);
  try {
    switch (Poller::kind(event)) {
      case Watched::kWake:
        return poller_.awake();
      case Watched::kListener:
        return target_.accept();
      case Watched::kServed:
        return target_.serve(number, event.events);
      case Watched::kPeer:
        return initiator_.serve(number, event.events);
    }
  } catch (const std::exception& error) {
    // No memory, most likely. This connection cannot go on; the others can.
    if (Poller::kind(event) == Watched::kServed) target_.drop(number);
    if (Poller::kind(event) == Watched::kPeer) initiator_.lose(number, error.what());
  }
}

void TcpEngine::run() {
  std::array<epoll_event, 64> events;
  while (true) {
    int timeout_ms;
    {
      const auto lock = turn();
      if (closing_) return;
      const auto now = Clock::now();
      initiator_.on_time(now);
      target_.on_time(now);
      timeout_ms = sleep_ms();
    }
    const int count = poller_.wait(events.data(), static_cast<int>(events.size()), timeout_ms);
    for (int i = 0; i < count; ++i) {
      const auto lock = turn();
      if (closing_) return;
      handle(events[static_cast<size_t>(i)]);
    }
  }
}

}  // namespace kvferry
