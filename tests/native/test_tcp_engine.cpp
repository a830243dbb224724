#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "harness.hpp"
#include "tcp_engine.hpp"

using namespace kvferry;
using kvferry::testing::kPatienceS;
using kvferry::testing::Observer;

namespace {

constexpr int64_t kBytes = 8 << 20;
const std::string kSecret(32, 's');

int listening(uint16_t& port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  CHECK(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(::listen(fd, 16) == 0);
  CHECK(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  port = ntohs(address.sin_port);
  return fd;
}

int connecting(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  (void)::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
  return fd;
}

// An engine, its memory, and where it listens.
struct End {
  explicit End(char fill) : memory(kBytes, fill) {
    engine.register_memory(reinterpret_cast<uintptr_t>(memory.data()), kBytes);
  }
  ~End() { engine.close(); }

  int64_t reach(const End& other, const std::string& secret = kSecret) {
    return engine.add_peer(connecting(other.port), secret, {kBytes}, kPatienceS);
  }
  int64_t post(int64_t peer, bool write, int64_t offset, int64_t bytes) {
    return engine.post(peer, write, 0, 0, &offset, &offset, &bytes, 1, kPatienceS);
  }

  std::vector<char> memory;
  uint16_t port = 0;
  TcpEngine engine{"test", listening(port), kSecret};
  Observer observer{engine.events()};
};

}  // namespace

KVFERRY_TEST(streams_both_ways) {
  End here('h'), there('t');
  const int64_t peer = here.reach(there);
  here.observer.wait_for({here.post(peer, false, 100, 4096), here.post(peer, false, 1 << 20, kBytes - (1 << 20))});
  CHECK(here.memory[99] == 'h' && here.memory[100] == 't' && here.memory[kBytes - 1] == 't');
  here.memory.assign(kBytes, 'w');
  here.observer.wait_for({here.post(peer, true, 0, kBytes)});
  CHECK(there.memory[0] == 'w' && there.memory[kBytes - 1] == 'w');
  for (const auto& [batch, error] : here.observer.completed) CHECK(error.empty());
}

KVFERRY_TEST(a_wrong_secret_reaches_nothing) {
  End here('h'), there('t');
  const int64_t peer = here.reach(there, std::string(32, 'x'));
  try {
    const int64_t batch = here.post(peer, false, 0, 4096);
    here.observer.wait_for({batch});
    CHECK(!here.observer.completed.at(batch).empty());
  } catch (const kvferry::testing::Failure&) {
    throw;
  } catch (const std::runtime_error&) {  // it was turned away before that
  }
  here.observer.wait([&] { return here.observer.down.count(peer) == 1; });
  CHECK(here.memory[0] == 'h');
}

KVFERRY_TEST(threads_post_while_their_connection_is_fenced) {
  End here('h'), there('t');
  constexpr int kThreads = 3;
  for (int round = 0; round < 4; ++round) {
    const int64_t peer = here.reach(there);
    std::atomic<int> posted{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        // Each thread its own stretch: no order is promised between batches.
        const int64_t offset = thread * (kBytes / kThreads);
        try {
          for (int n = 0; n < 200; ++n, ++posted) here.post(peer, false, offset, n % 10 == 0 ? 1 << 20 : 4096);
        } catch (const std::runtime_error&) {  // it has been fenced
        }
      });
    }
    here.observer.wait([&] { return posted > 20; });
    here.engine.fence(peer);
    here.observer.wait([&] { return here.observer.fenced.count(peer) == 1; });
    for (auto& thread : threads) thread.join();
    here.memory.assign(kBytes, 'm');  // nothing is received any more
  }
}

KVFERRY_TEST(the_end_of_a_target_is_told) {
  End here('h');
  int64_t peer = -1;
  {
    End there('t');
    peer = here.reach(there);
    here.observer.wait_for({here.post(peer, false, 0, 4096)});
    for (int n = 0; n < 20; ++n) here.post(peer, n % 2 == 0, 0, kBytes);
  }
  here.observer.wait([&] { return here.observer.down.count(peer) == 1; });
}
