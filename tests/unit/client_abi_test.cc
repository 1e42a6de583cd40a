// What libsluice.so shows to the outside: its symbols, their version, and the libraries it needs.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <memory>
#include <set>
#include <sstream>
#include <string>

namespace {

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string output;
  std::array<char, 4096> chunk{};
  while (const size_t length = std::fread(chunk.data(), 1, chunk.size(), pipe.get()))
    output.append(chunk.data(), length);
  return output;
}

TEST(Abi, ExportsTheCInterfaceAndNothingElse) {
  std::istringstream lines(output_of("nm -D --defined-only " SLUICE_LIBRARY));
  std::set<std::string> symbols;
  std::string line;
  while (std::getline(lines, line)) {
    const std::string symbol = line.substr(line.rfind(' ') + 1);
    if (symbol == "SLUICE_1") continue;  // the version itself
    EXPECT_EQ(symbol.rfind("sluice_", 0), 0U) << symbol;
    EXPECT_NE(symbol.find("@@SLUICE_1"), std::string::npos) << symbol << " has no version";
    symbols.insert(symbol.substr(0, symbol.find('@')));
  }
  // Every function that the header declares is there: the header's text is the list.
  std::istringstream header(output_of("cat " SLUICE_HEADER));
  std::set<std::string> declared;
  while (std::getline(header, line)) {
    if (line.rfind("SLUICE_API ", 0) != 0) continue;
    const size_t parenthesis = line.find('(');
    ASSERT_NE(parenthesis, std::string::npos) << line;
    size_t begin = line.find_last_of(" *", parenthesis) + 1;
    declared.insert(line.substr(begin, parenthesis - begin));
  }
  EXPECT_GT(declared.size(), 15U);
  EXPECT_EQ(symbols, declared);
}

TEST(Abi, NeedsOnlyTheCAndCxxRuntime) {
#ifdef SLUICE_SANITIZED
  GTEST_SKIP() << "a build with sanitizers needs their run-time libraries too";
#endif
  const std::string dynamic = output_of("readelf -d " SLUICE_LIBRARY);
  EXPECT_NE(dynamic.find("Library soname: [libsluice.so.0]"), std::string::npos) << dynamic;
  std::istringstream lines(dynamic);
  std::string line;
  int needed = 0;
  while (std::getline(lines, line)) {
    if (line.find("(NEEDED)") == std::string::npos) continue;
    ++needed;
    const std::string name = line.substr(line.find('[') + 1);
    bool known = false;
    for (const char* allowed : {"libc.so", "libm.so", "libstdc++.so", "libgcc_s.so", "ld-linux"}) {
      known = known || name.rfind(allowed, 0) == 0;
    }
    EXPECT_TRUE(known) << name;
  }
  EXPECT_GE(needed, 2);
}

}  // namespace
