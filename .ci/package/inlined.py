"""Fails if a kernel calls the wrapper of a vector instruction instead of having the instruction in its code.

Such calls, which appear when the compiler inlines less than before, make a kernel ten times slower and are not wrong otherwise.
Functions that no kernel reaches do not count: some crates call wrappers where speed does not matter.

usage: inlined.py BINARY     needs nm and objdump
"""

import re
import subprocess
import sys

KERNEL = re.compile(r"run_avx(2|512)")
WRAPPER = re.compile(r"core_arch.*?(_mm(?:256|512)?_[a-z0-9]+(?:_[a-z0-9]+)?)")
FUNCTION = re.compile(r"([0-9a-f]+) <.+>:$")
CALL = re.compile(r"\t(?:call|jmp) +([0-9a-f]+) <")


def lines(*command):
    # The text of a program may be anything.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        yield from process.stdout
    if process.returncode != 0:
        sys.exit(f"error: {command[0]} fails")


def main(binary):
    kernels, wrappers = set(), {}
    for line in lines("nm", binary):
        address, _, name = line.rstrip().rpartition(" ")
        if KERNEL.search(name):
            kernels.add(int(address.split()[0], 16))
        elif wrapper := WRAPPER.search(name):
            wrappers[int(address.split()[0], 16)] = wrapper[1]
    if not kernels:
        sys.exit(f"error: {binary} has no symbols of kernels")
    # Functions are told apart by their addresses, because equal ones share an address under several names.
    calls, function = {}, None
    for line in lines("objdump", "--disassemble", "--no-show-raw-insn", binary):
        if found := FUNCTION.match(line):
            function = int(found[1], 16)
        elif function is not None and (found := CALL.search(line)):
            calls.setdefault(function, set()).add(int(found[1], 16))
    reached, next_ones = set(), kernels
    while next_ones:
        reached |= next_ones
        next_ones = {callee for caller in next_ones for callee in calls.get(caller, ())} - reached
    called = sorted({wrappers[address] for address in reached & wrappers.keys()})
    if called:
        sys.exit(f"error: {binary} calls instructions instead of having them: {' '.join(called)}")


main(sys.argv[1])
