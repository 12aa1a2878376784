// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target where there is no libFuzzer: on random bytes, or on the inputs in files.
//   random_inputs COUNT | random_inputs FILE...
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size);

namespace {

constexpr size_t kLongest = 96;  // bytes, about 40 edits

void runRandom(long count) {
  std::mt19937_64 random(11);
  std::vector<uint8_t> input;
  for (long i = 0; i < count; ++i) {
    input.resize(random() % (kLongest + 1));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld random inputs, nothing found\n", count);
}

void runFile(char const* name) {
  std::ifstream file(name, std::ios::binary);
  std::vector<char> const input{std::istreambuf_iterator<char>(file), {}};
  LLVMFuzzerTestOneInput(reinterpret_cast<uint8_t const*>(input.data()), input.size());
  std::printf("%s: nothing found in %zu bytes\n", name, input.size());
}

}  // namespace

int main(int argc, char** argv) {
  char* end = nullptr;
  long const count = argc == 2 ? std::strtol(argv[1], &end, 10) : 0;
  if (end != nullptr && *end == '\0' && count > 0) {
    runRandom(count);
    return 0;
  }
  for (int i = 1; i < argc; ++i) runFile(argv[i]);
  return argc > 1 ? 0 : 2;
}
