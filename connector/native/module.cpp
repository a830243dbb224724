// The Python face of the native core. See connector/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "copier.hpp"
#include "runs.hpp"
#include "tcp_engine.hpp"
#include "ucp_api.hpp"
#include "ucp_worker.hpp"

namespace nb = nanobind;
using namespace kvferry;

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t common_size(const Offsets& local, const Offsets& remote, const Offsets& length) {
  if (local.shape(0) != remote.shape(0) || local.shape(0) != length.shape(0))
    throw nb::value_error("local, remote and length must have as many elements as each other");
  return local.shape(0);
}

using EventTuple = std::tuple<const char*, int64_t, int64_t, std::string>;

const char* name_of(EventKind kind) {
  switch (kind) {
    case EventKind::kCompleted:
      return "completed";
    case EventKind::kLost:
      return "lost";
    case EventKind::kLate:
      return "late";
    case EventKind::kFenced:
      return "fenced";
  }
  throw std::logic_error("an event of no kind");
}

std::vector<EventTuple> drained(EventQueue& events) {
  std::vector<EventTuple> result;
  for (Event& event : events.drain())
    result.emplace_back(name_of(event.kind), event.peer, event.batch, std::move(event.text));
  return result;
}

int64_t post_copy(Copier& copier, int64_t peer, bool write, uintptr_t local_address, int64_t local_bytes,
                  uintptr_t remote_address, int64_t remote_bytes, const Offsets& local, const Offsets& remote,
                  const Offsets& length, double timeout_s) {
  const size_t count = common_size(local, remote, length);
  nb::gil_scoped_release released;
  std::vector<Run> runs =
      checked_and_merged(local.data(), remote.data(), length.data(), count, local_bytes, remote_bytes);
  return copier.post(peer, write, reinterpret_cast<char*>(local_address), reinterpret_cast<char*>(remote_address),
                     std::move(runs), timeout_s);
}

void copy_runs(uintptr_t destination, int64_t destination_bytes, uintptr_t source, int64_t source_bytes,
               const Offsets& to, const Offsets& from, const Offsets& length) {
  const size_t count = common_size(to, from, length);
  nb::gil_scoped_release released;
  const std::vector<Run> runs =
      checked_and_merged(to.data(), from.data(), length.data(), count, destination_bytes, source_bytes);
  copy_now(reinterpret_cast<char*>(destination), reinterpret_cast<const char*>(source), runs);
}

using RunTable = nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 3>, nb::c_contig>;
static_assert(sizeof(Run) == 3 * sizeof(int64_t));

RunTable merged_runs(const Offsets& local, const Offsets& remote, const Offsets& length, int64_t local_bytes,
                     int64_t remote_bytes) {
  const size_t count = common_size(local, remote, length);
  std::unique_ptr<std::vector<Run>> runs;
  {
    nb::gil_scoped_release released;
    runs = std::make_unique<std::vector<Run>>(
        checked_and_merged(local.data(), remote.data(), length.data(), count, local_bytes, remote_bytes));
  }
  std::vector<Run>* kept = runs.release();
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<Run>*>(vector); });
  return RunTable(kept->data(), {kept->size(), 3}, owner);
}

std::string as_string(const nb::bytes& bytes) { return {static_cast<const char*>(bytes.data()), bytes.size()}; }

nb::bytes as_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

int64_t connect_ucp(UcpWorker& worker, const nb::bytes& address,
                    const std::vector<std::tuple<uint64_t, int64_t, nb::bytes>>& regions) {
  std::vector<UcpWorker::RemoteRegion> remote;
  for (const auto& [base, length, key] : regions) remote.push_back({base, length, as_string(key)});
  const std::string copy = as_string(address);
  nb::gil_scoped_release released;
  return worker.connect(copy, remote);
}

int64_t post_ucp(UcpWorker& worker, int64_t peer, bool write, int64_t local_region, int64_t remote_region,
                 const Offsets& local, const Offsets& remote, const Offsets& length, double timeout_s) {
  const size_t count = common_size(local, remote, length);
  nb::gil_scoped_release released;
  return worker.post(peer, write, local_region, remote_region, local.data(), remote.data(), length.data(), count,
                     timeout_s);
}

int64_t post_tcp(TcpEngine& engine, int64_t peer, bool write, int64_t local_region, int64_t remote_region,
                 const Offsets& local, const Offsets& remote, const Offsets& length, double timeout_s) {
  const size_t count = common_size(local, remote, length);
  nb::gil_scoped_release released;
  return engine.post(peer, write, local_region, remote_region, local.data(), remote.data(), length.data(), count,
                     timeout_s);
}

int64_t add_tcp_peer(TcpEngine& engine, int fd, const nb::bytes& secret, std::vector<int64_t> region_bytes,
                     double timeout_s) {
  const std::string copy = as_string(secret);
  nb::gil_scoped_release released;
  return engine.add_peer(fd, copy, std::move(region_bytes), timeout_s);
}

}  // namespace

NB_MODULE(_native, m) {
  // A process may end while its transports are open; what that leaves is no leak.
  nb::set_leak_warnings(false);
  nb::exception<OutOfBounds>(m, "OutOfBounds", PyExc_ValueError);

  m.def("copy_runs", &copy_runs, nb::arg("destination"), nb::arg("destination_bytes"), nb::arg("source"),
        nb::arg("source_bytes"), nb::arg("to"), nb::arg("from_"), nb::arg("length"));

  m.def("merged_runs", &merged_runs, nb::arg("local"), nb::arg("remote"), nb::arg("length"), nb::arg("local_bytes"),
        nb::arg("remote_bytes"));

  nb::class_<Copier>(m, "Copier")
      .def(nb::init<std::string>(), nb::arg("name"))
      .def(
          "add_peer",
          [](Copier& copier, int pidfd, const std::vector<std::pair<uintptr_t, int64_t>>& mapped) {
            std::vector<std::pair<char*, int64_t>> memory;
            for (const auto& [address, bytes] : mapped) memory.emplace_back(reinterpret_cast<char*>(address), bytes);
            return copier.add_peer(pidfd, std::move(memory));
          },
          nb::arg("pidfd"), nb::arg("mapped"))
      .def("post", &post_copy, nb::arg("peer"), nb::arg("write"), nb::arg("local_address"), nb::arg("local_bytes"),
           nb::arg("remote_address"), nb::arg("remote_bytes"), nb::arg("local"), nb::arg("remote"), nb::arg("length"),
           nb::arg("timeout_s"))
      .def("fence", &Copier::fence, nb::arg("peer"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Copier::close, nb::call_guard<nb::gil_scoped_release>())
      .def("fileno", [](Copier& copier) { return copier.events().fileno(); })
      .def("drain", [](Copier& copier) { return drained(copier.events()); });

  m.def("keep_ucx_to_itself", &keep_ucx_to_itself);

  m.def(
      "ucx_version",
      [](const std::string& library) {
        nb::gil_scoped_release released;
        const UcpApi& api = load_ucp(library);
        return std::make_pair(api.version, api.path);
      },
      nb::arg("library"));

  nb::class_<UcpWorker>(m, "UcpWorker")
      .def(
          "__init__",
          [](UcpWorker* self, const std::string& library, const std::string& name,
             const std::vector<std::pair<std::string, std::string>>& config) {
            nb::gil_scoped_release released;  // looking at every device takes its time
            new (self) UcpWorker(load_ucp(library), name, config);
          },
          nb::arg("library"), nb::arg("name"), nb::arg("config"))
      .def("register_memory", &UcpWorker::register_memory, nb::arg("address"), nb::arg("length"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("address",
           [](UcpWorker& worker) {
             std::string address;
             {
               nb::gil_scoped_release released;
               address = worker.address();
             }
             return as_bytes(address);
           })
      .def(
          "packed_key",
          [](UcpWorker& worker, int64_t region) {
            std::string key;
            {
              nb::gil_scoped_release released;
              key = worker.packed_key(region);
            }
            return as_bytes(key);
          },
          nb::arg("region"))
      .def("connect", &connect_ucp, nb::arg("address"), nb::arg("regions"))
      .def("post", &post_ucp, nb::arg("peer"), nb::arg("write"), nb::arg("local_region"), nb::arg("remote_region"),
           nb::arg("local"), nb::arg("remote"), nb::arg("length"), nb::arg("timeout_s"))
      .def("fence", &UcpWorker::fence, nb::arg("peer"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &UcpWorker::close, nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("fileno", [](UcpWorker& worker) { return worker.events().fileno(); })
      .def("drain", [](UcpWorker& worker) { return drained(worker.events()); });

  nb::class_<TcpEngine>(m, "TcpEngine")
      .def(
          "__init__",
          [](TcpEngine* self, const std::string& name, int listener, const nb::bytes& secret) {
            new (self) TcpEngine(name, listener, as_string(secret));
          },
          nb::arg("name"), nb::arg("listener"), nb::arg("secret"))
      .def("register_memory", &TcpEngine::register_memory, nb::arg("address"), nb::arg("length"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("add_peer", &add_tcp_peer, nb::arg("fd"), nb::arg("secret"), nb::arg("region_bytes"), nb::arg("timeout_s"))
      .def("post", &post_tcp, nb::arg("peer"), nb::arg("write"), nb::arg("local_region"), nb::arg("remote_region"),
           nb::arg("local"), nb::arg("remote"), nb::arg("length"), nb::arg("timeout_s"))
      .def("fence", &TcpEngine::fence, nb::arg("peer"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &TcpEngine::close, nb::call_guard<nb::gil_scoped_release>())
      .def("fileno", [](TcpEngine& engine) { return engine.events().fileno(); })
      .def("drain", [](TcpEngine& engine) { return drained(engine.events()); });
}
