// transport/port: addresses, the peer table, the choice of an interface.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "base/prng.h"
#include "transport/port/endpoint.h"
#include "transport/port/interfaces.h"
#include "transport/port/peer_table.h"

namespace sluice::port {
namespace {

TEST(Endpoint, TextAndBack) {
  for (const char* text : {"10.0.0.1:9470", "0.0.0.0:0", "255.255.255.255:65535", "[::1]:1",
                           "[2001:db8::7]:9470", "[fe80::1%2]:9470", "[::]:0"}) {
    const auto endpoint = parse_endpoint(text);
    ASSERT_TRUE(endpoint.ok()) << endpoint.error().message;
    EXPECT_EQ(to_string(*endpoint), text);
  }
  // IPv4 has one form only, so that comparing is comparing bytes.
  EXPECT_EQ(*parse_endpoint("[::ffff:10.0.0.1]:5"), ipv4_endpoint(10, 0, 0, 1, 5));
  EXPECT_TRUE(is_ipv4(*parse_endpoint("1.2.3.4:5")));
  EXPECT_FALSE(is_ipv4(*parse_endpoint("[::1]:5")));
  EXPECT_EQ(parse_endpoint("[fe80::1%2]:9470")->scope, 2U);
}

TEST(Endpoint, NonsenseIsRefusedWithAnExample) {
  for (const char* text : {"",
                           ":",
                           "10.0.0.1",
                           "10.0.0.1:",
                           ":9470",
                           "10.0.0.1:65536",
                           "10.0.0.1:-1",
                           "10.0.0.1:9 ",
                           "10.0.0:1",
                           "node1:9470",
                           "::1:9470",
                           "[::1]",
                           "[::1]9470",
                           "[::1:9470",
                           "[10.0.0.1]:9470",
                           "10.0.0.1%1:9470",
                           "[fe80::1%eth0]:9470",
                           "[fe80::1%0]:9470",
                           "[fe80::1%]:9470",
                           "1.2.3.4:0x10"}) {
    const auto endpoint = parse_endpoint(text);
    ASSERT_FALSE(endpoint.ok()) << text;
    EXPECT_NE(endpoint.error().message.find("10.0.0.1:9470"), std::string::npos) << endpoint.error().message;
  }
}

TEST(PeerTable, AgreesWithAMap) {
  PeerTable table;
  std::map<uint32_t, std::pair<PeerHandle, int>> model;  // address -> handle, uses
  Prng random(1);
  const auto endpoint = [](uint32_t i) {
    return ipv4_endpoint(10, 0, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i), 9470);
  };
  for (int step = 0; step < 200000; ++step) {
    // Grows to about a thousand peers, then shrinks, again and again.
    const bool growing = (step / 20000) % 2 == 0;
    const auto i = static_cast<uint32_t>(random.below(2000));
    const auto known = model.find(i);
    if (random.chance(growing ? 0.7 : 0.3)) {
      const PeerHandle handle = table.add(endpoint(i));
      if (known != model.end()) {
        ASSERT_EQ(handle, known->second.first);
        ++known->second.second;
      } else {
        for (const auto& [other, entry] : model) ASSERT_NE(entry.first, handle) << other;
        model[i] = {handle, 1};
      }
    } else if (known != model.end()) {
      table.remove(known->second.first);
      if (--known->second.second == 0) model.erase(known);
    }
    ASSERT_EQ(table.size(), model.size());
    const auto probe = static_cast<uint32_t>(random.below(2000));
    const auto expected = model.find(probe);
    ASSERT_EQ(table.find(endpoint(probe)), expected == model.end() ? kUnknownPeer : expected->second.first);
    if (expected != model.end()) {
      ASSERT_TRUE(table.contains(expected->second.first));
      ASSERT_EQ(table.endpoint(expected->second.first), endpoint(probe));
    }
  }
  EXPECT_LE(table.capacity(), 2000U);
}

Interface make(const std::string& name, uint32_t index, std::vector<std::string> addresses,
               uint64_t gigabits = 0) {
  Interface interface;
  interface.name = name;
  interface.index = index;
  interface.up = true;
  interface.loopback = name == "lo";
  interface.mtu = interface.loopback ? 65536 : 1500;
  interface.bits_per_second = gigabits * 1'000'000'000;
  for (const std::string& text : addresses) {
    InterfaceAddress address;
    address.ip = *parse_ip(text);
    address.prefix_length = is_ipv4(address.ip) ? 24 : 64;
    interface.addresses.push_back(address);
  }
  return interface;
}

const std::vector<Interface>& cluster_node() {
  static const std::vector<Interface> interfaces = [] {
    std::vector<Interface> list = {make("lo", 1, {"127.0.0.1", "::1"}),
                                   make("eth0", 2, {"192.168.1.5", "2001:db8::5", "fe80::5%2"}, 1),
                                   make("ens3f0", 3, {"10.1.0.5", "fe80::6%3"}, 100),
                                   make("ens3f1", 4, {"10.2.0.5"}, 100),
                                   make("ens4", 5, {"169.254.7.7", "fe80::7%5"}, 400),
                                   make("ib0", 6, {"10.3.0.5"}, 400),
                                   make("docker0", 7, {"172.17.0.1"}, 1000),
                                   make("veth1a2b", 8, {"172.18.0.1"}, 1000)};
    list[1].default_route = true;
    list[5].up = false;
    return list;
  }();
  return interfaces;
}

std::string chosen(const std::string& want, const std::vector<Interface>& interfaces = cluster_node()) {
  const auto choice = choose_bind(want, 9470, interfaces);
  return choice.ok() ? choice->interface + " " + to_string(choice->endpoint)
                     : "error: " + choice.error().message;
}

TEST(ChooseBind, AutoTakesTheFastestRealOne) {
  EXPECT_EQ(chosen("auto"), "ens3f0 10.1.0.5:9470");
  const std::string reason = choose_bind("auto", 0, cluster_node())->reason;
  for (const char* part : {"10.1.0.5/24", "100 Gb/s", "of 3", "lo (loopback)", "docker0", "veth1a2b",
                           "ib0 (down)", "ens4 (no routable address)", "eth0 (1 Gb/s)"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << part << " in: " << reason;
  }
}

TEST(ChooseBind, AutoOnTies) {
  auto list = cluster_node();
  list[3].default_route = true;
  list[1].default_route = false;
  EXPECT_EQ(chosen("auto", list), "ens3f1 10.2.0.5:9470");
  // Where no speed is known the default route decides, then the order.
  for (Interface& interface : list) interface.bits_per_second = 0;
  list[3].default_route = false;
  EXPECT_EQ(chosen("auto", list), "eth0 192.168.1.5:9470");
}

TEST(ChooseBind, AutoInANamespaceWithOneVethNamedEth0) {
  EXPECT_EQ(chosen("auto", {make("lo", 1, {"127.0.0.1"}), make("eth0", 2, {"10.0.0.2"})}),
            "eth0 10.0.0.2:9470");
  EXPECT_EQ(chosen("auto", {make("lo", 1, {"::1"}), make("eth0", 2, {"fe80::1%2", "2001:db8::2"})}),
            "eth0 [2001:db8::2]:9470");
}

TEST(ChooseBind, AutoNeverTakesWhatIsNoWayOut) {
  for (const auto& list : std::vector<std::vector<Interface>>{{},
                                                              {make("lo", 1, {"127.0.0.1"})},
                                                              {make("docker0", 1, {"172.17.0.1"})},
                                                              {make("eth0", 1, {})},
                                                              {make("eth0", 1, {"169.254.1.1", "fe80::1%1"})},
                                                              {make("br-0123456789ab", 1, {"172.18.0.1"})},
                                                              {make("virbr0", 1, {"192.168.122.1"})},
                                                              {make("wg0", 1, {"10.9.0.1"})}}) {
    const std::string text = chosen("auto", list);
    EXPECT_EQ(text.rfind("error: ", 0), 0U) << text;
    EXPECT_NE(text.find("bind"), std::string::npos);
    for (const Interface& interface : list) EXPECT_NE(text.find(interface.name), std::string::npos) << text;
  }
}

TEST(ChooseBind, RangesNamesAndAddressesAreTakenAtTheirWord) {
  EXPECT_EQ(chosen("10.2.0.0/16"), "ens3f1 10.2.0.5:9470");
  EXPECT_EQ(chosen("10.0.0.0/14"), "ens3f0 10.1.0.5:9470");
  EXPECT_EQ(chosen("172.18.0.0/16"), "veth1a2b 172.18.0.1:9470");
  EXPECT_EQ(chosen("127.0.0.0/8"), "lo 127.0.0.1:9470");
  EXPECT_EQ(chosen("2001:db8::/32"), "eth0 [2001:db8::5]:9470");
  EXPECT_EQ(chosen("10.2.0.4/30"), "ens3f1 10.2.0.5:9470");
  EXPECT_EQ(chosen("0.0.0.0/0"), "docker0 172.17.0.1:9470");
  EXPECT_EQ(chosen("veth1a2b"), "veth1a2b 172.18.0.1:9470");
  EXPECT_EQ(chosen("lo"), "lo 127.0.0.1:9470");
  EXPECT_EQ(chosen("ens4"), "ens4 169.254.7.7:9470");
  EXPECT_EQ(chosen("192.168.1.5"), "eth0 192.168.1.5:9470");
  EXPECT_EQ(chosen("fe80::6%3"), "ens3f0 [fe80::6%3]:9470");
  EXPECT_EQ(chosen("fe80::6"), "ens3f0 [fe80::6%3]:9470");
}

TEST(ChooseBind, ErrorsSayWhatThereIs) {
  for (const auto& [want, parts] : std::map<std::string, std::vector<std::string>>{
           {"10.99.0.0/16", {"10.99.0.0/16", "eth0 (192.168.1.5)", "ens3f0 (10.1.0.5)"}},
           {"10.3.0.0/16", {"ib0 (down)"}},
           {"eth9", {"'eth9'", "eth0 (192.168.1.5)"}},
           {"ib0", {"ib0 is down", "ip link set ib0 up"}},
           {"10.0.0.99", {"10.0.0.99", "eth0 (192.168.1.5)"}},
           {"10.0.0.0/33", {"'10.0.0.0/33'", "10.0.0.0/8"}},
           {"10.0.0.0/", {"10.0.0.0/8"}},
           {"eth0/8", {"'eth0/8'"}},
           {"fe80::6%4", {"fe80::6%4"}}}) {
    const std::string text = chosen(want);
    EXPECT_EQ(text.rfind("error: ", 0), 0U) << text;
    for (const std::string& part : parts)
      EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

TEST(ListInterfaces, FindsLoopback) {
  const auto interfaces = list_interfaces();
  ASSERT_TRUE(interfaces.ok()) << interfaces.error().message;
  bool found = false;
  for (const Interface& interface : *interfaces) {
    EXPECT_GT(interface.index, 0U);
    if (interface.name != "lo") continue;
    found = true;
    EXPECT_TRUE(interface.loopback);
    EXPECT_GE(interface.mtu, 1280U);
    EXPECT_EQ(interface.bits_per_second, 0U);
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace sluice::port
