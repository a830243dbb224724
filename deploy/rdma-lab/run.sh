#!/usr/bin/env bash
# Runs the connector's checks over real ibverbs, on a machine without RDMA hardware: a guest in qemu with Soft-RoCE.
#
#   run.sh [--require]   0: every check passed, or "SKIPPED: reason" because this machine cannot have the lab
#                        with --require a lab that cannot be had is an error too
#
#   KVFERRY_RDMA_LAB   where the lab is cached (~/.cache/kvferry/rdma-lab)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${KVFERRY_RDMA_LAB:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/rdma-lab}
ready=$cache/ready
folder=$cache/run # of this run; the guest writes into it
python=$repository/.venv/bin/python
guest_timeout_s=560
lock_timeout_s=1800
required=
case ${1:-} in
  '') ;;
  --require) required=yes ;;
  *) echo "rdma-lab: unknown option '$1'; there is only --require" >&2 && exit 2 ;;
esac

skip() {
  if [[ -n $required ]]; then
    echo "rdma-lab: required, but it cannot be set up: $*" >&2
    exit 1
  fi
  echo "SKIPPED: $*"
  exit 0
}

fail() {
  echo "rdma-lab: $*" >&2
  exit 1
}

# What the kernel said last, without the firmware's control characters.
console() { sed -e 's/\x1b[^a-zA-Z]*[a-zA-Z]//g' -e 's/\r//g' "$folder/console" | grep -v '^$' | tail -n 20 >&2 || true; }

# The guest never outlives this script, not even one that is killed: see `bounded`.
guest=
clean_up() {
  [[ -n $guest ]] || return 0
  kill "$guest" 2>/dev/null || true
  wait "$guest" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

[[ -x $python ]] || fail "there is no $python; run 'make build' first"
for tool in flock setpriv timeout; do
  command -v "$tool" >/dev/null || skip "there is no $tool on this machine"
done
mkdir -p "$cache" 2>/dev/null || skip "the cache folder $cache cannot be made"
exec 9>"$cache/lock"
flock --nonblock 9 || echo "rdma-lab: waiting for another run in $cache"
flock --timeout "$lock_timeout_s" 9 || fail "another run has held $cache/lock for $lock_timeout_s s"
status=0
reason=$(nice -n 10 "$here/setup.sh" "$cache" 9>&-) || status=$?
((status != 75)) || skip "$reason"
((status == 0)) || fail "the set-up failed with status $status; see $cache/setup.log"

rm -rf "$folder"
mkdir "$folder"
cp "$here/guest-init" "$folder/"
base=$("$python" -c 'import sys; print(sys.base_prefix)')
printf '%s=%q\n' REPOSITORY "$repository" BASE "$base" >"$folder/settings"

shared=()
share() { # TAG FOLDER [OPTIONS]
  shared+=(-fsdev "local,id=$1,path=${2//,/,,},security_model=none,multidevs=remap${3:-}")
  shared+=(-device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}
share rootfs "$ready/root" ,readonly=on
share lab "$folder"
share repository "$repository" ,readonly=on
share base "$base" ,readonly=on

machine=(-machine q35 -accel "tcg,thread=multi" -cpu max -smp 2 -m 3G -nodefaults -nographic -no-reboot)
machine+=(-serial "file:$folder/console" -serial stdio)
machine+=(-netdev "user,id=net,restrict=on" -device "virtio-net-pci,netdev=net,romfile=" -device virtio-rng-pci)
qemu="qemu-system-x86_64"
libraries=
if ! command -v "$qemu" >/dev/null; then
  unpacked=$ready/host/usr
  qemu=$unpacked/bin/$qemu
  machine+=(-L "$unpacked/share/qemu" -L "$unpacked/share/seabios" -L "$unpacked/lib/ipxe/qemu")
  libraries=$unpacked/lib/x86_64-linux-gnu:$ready/host/lib/x86_64-linux-gnu
fi
# Calibrated by the guest itself, its clock is wrong by more than ten times while the host is busy.
khz=$(awk '/MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
kernel="console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr tsc=reliable tsc_early_khz=$khz"

bounded=(setpriv --pdeathsig TERM timeout --kill-after=5 "$guest_timeout_s" setpriv --pdeathsig KILL nice -n 10)
[[ -z $libraries ]] || bounded+=(env "LD_LIBRARY_PATH=$libraries") # for qemu alone, not for this machine's programs
echo "rdma-lab: booting; the checks take minutes, in software emulation"
started=$SECONDS
"${bounded[@]}" "$qemu" "${machine[@]}" "${shared[@]}" -kernel "$ready/vmlinuz" -initrd "$ready/initrd.gz" \
  -append "$kernel" </dev/null 9>&- &
guest=$!
status=0
wait "$guest" || status=$?
guest=
if [[ ! -s $folder/status ]]; then
  console
  fail "the guest ended without a verdict after $((SECONDS - started)) s (qemu ended with $status, 124 is its time limit)"
fi
verdict=$(<"$folder/status")
if ((verdict != 0)); then
  console
  fail "the checks failed in the guest with status $verdict"
fi
echo "rdma-lab: every check passed, in $((SECONDS - started)) s with the boot"
