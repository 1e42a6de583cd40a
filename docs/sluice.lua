-- Wireshark dissector for Sluice (docs/protocol.md, section 14).
--
--   wireshark -X lua_script:docs/sluice.lua capture.pcapng
--   tshark    -X lua_script:docs/sluice.lua -r capture.pcapng -Y 'sluice.type == 6'
--
-- or copy it into the folder that Help > About > Folders names "Personal Lua Plugins". Packets are found by their first
-- bytes on any UDP port; Decode As > Sluice helps where that fails. With `sealing: none` packets have no tag: switch off
-- the preference "Packets end with a tag". Tags are shown, not verified: the dissector has no key.
-- Needs Wireshark 3.0 or newer. Plain arithmetic instead of bit operations, because Lua 5.2 and 5.4 differ in them.

local sluice = Proto("sluice", "Sluice gradient exchange")

sluice.prefs.tagged = Pref.bool("Packets end with a tag", true, "The job's `sealing` is not `none`")

local MAGIC, VERSION = 0x53, 1
local HEADER, TAG = 48, 16

local TYPES = {
  [1] = "HELLO", [2] = "HELLO_ACK", [3] = "PING", [4] = "PONG", [5] = "ANNOUNCE", [6] = "PUSH", [7] = "PULL",
  [8] = "REQUEST", [9] = "REQUEST_ROW", [10] = "ROW", [11] = "FEEDBACK", [12] = "GONE", [13] = "ABORT",
  [14] = "PUSH2", [15] = "PULL2",
}
local HELLO, HELLO_ACK, PING, PONG, ANNOUNCE, PUSH, PULL, REQUEST, REQUEST_ROW, ROW, FEEDBACK, GONE, ABORT, PUSH2, PULL2 =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15

local CLASSES = { [0] = "exact", [1] = "consistent", [2] = "best_effort" }
local KINDS = { [0] = "sum", [1] = "mean" }
local ELEMENTS = { [0] = "f32", [1] = "f16", [2] = "bf16", [3] = "f64", [4] = "i32", [5] = "i64", [6] = "u8" }
local SEALINGS = { [0] = "none", [1] = "auth", [2] = "encrypt" }
local STATUSES = {
  [0] = "OK", [1] = "CORRECTED", [2] = "INCOMPLETE", [3] = "DIVERGED", [4] = "APPROXIMATED", [16] = "MISMATCH",
  [17] = "OP_TIMEOUT", [18] = "PEER_LOST", [19] = "RANK_TIMEOUT", [20] = "VIEW_CHANGED", [21] = "ABORTED",
  [22] = "DAEMON_LOST", [23] = "INVALID", [24] = "NO_MEMORY", [25] = "TIMEOUT", [26] = "REFUSED",
}

local f = {}
local function field(name, kind, text, ...) f[name] = ProtoField[kind]("sluice." .. name:gsub("__", "."), text, ...) end

-- header
field("magic", "uint8", "Magic", base.HEX)
field("version", "uint8", "Version")
field("type", "uint8", "Type", base.DEC, TYPES)
field("flags", "uint8", "Flags", base.HEX)
field("flags__tail", "bool", "Tail", 8, nil, 0x01)
field("flags__class", "uint8", "Class", base.DEC, CLASSES, 0x06)
field("flags__encoded", "bool", "Encoded (Hadamard)", 8, nil, 0x08)
field("flags__nonfinite", "bool", "Holds non-finite values", 8, nil, 0x10)
field("flags__all_counted", "bool", "All counted", 8, nil, 0x20)
field("flags__skip", "bool", "Skipped", 8, nil, 0x40)
field("flags__row", "bool", "Ask for the row", 8, nil, 0x80)
field("flags__kind", "uint8", "Kind", base.DEC, KINDS, 0x10)
field("flags__wire_type", "uint8", "Wire type", base.DEC, ELEMENTS, 0xE0)
field("sender", "uint16", "Sender")
field("lane", "uint8", "Lane")
field("policy", "uint8", "Policy (mod 256)")
field("job", "uint32", "Job", base.HEX)
field("epoch", "uint32", "Epoch", base.HEX)
field("op", "uint32", "Op")
field("op__daemon", "bool", "Op of the daemons", 32, nil, 0x80000000)
field("shard", "uint16", "Shard")
field("receiver", "uint16", "Receiver")
field("elements", "uint16", "Elements")
field("block", "uint24", "Block")
field("total", "uint24", "Total blocks")
field("ranks", "uint16", "Ranks")
field("subject", "uint16", "Subject")
field("fingerprint", "uint32", "Fingerprint", base.HEX)
field("stamp", "uint32", "Stamp (us)")
field("counter", "uint64", "Counter")
field("phase", "uint32", "Key phase")
field("payload", "bytes", "Payload")
field("tag", "bytes", "Tag")
-- shared by several payloads
field("done", "uint32", "done")
field("base", "uint32", "base")
field("bitmap", "bytes", "Bitmap (from block on)")
field("bitmap__ones", "uint32", "Bits set")
field("echo", "uint32", "Echo of stamp (us)")
field("hold", "uint32", "Held (us)")
field("grant", "uint32", "Grant (kbit/s)")
-- ANNOUNCE
field("announce__age", "uint32", "Age (us)")
field("announce__flags", "uint32", "Announce flags", base.HEX)
field("announce__contributes", "bool", "Contributes", 32, nil, 1)
field("announce__receives", "bool", "Receives", 32, nil, 2)
-- PING, PONG
field("ping__pulse_done", "uint32", "pulse_done")
field("ping__policy", "uint32", "Policy")
field("ping__flags", "uint32", "Ping flags", base.HEX)
field("ping__record", "bytes", "Policy record")
-- FEEDBACK
field("feedback__flags", "uint32", "Feedback flags", base.HEX)
field("feedback__ecn", "bool", "Congestion experienced", 32, nil, 1)
-- PUSH, PULL
field("values", "bytes", "Values")
field("verdict__count", "uint16", "Senders not counted")
field("verdict__sender", "uint16", "Not counted")
-- ABORT
field("abort__reason", "uint16", "Reason", base.DEC, STATUSES)
field("abort__count", "uint16", "Missing senders")
field("abort__kind", "uint8", "Kind", base.DEC, KINDS)
field("abort__element_type", "uint8", "Element type", base.DEC, ELEMENTS)
field("abort__wire_type", "uint8", "Wire type", base.DEC, ELEMENTS)
field("abort__elements", "uint64", "Elements")
field("abort__tag", "uint64", "Tag of the tensor", base.HEX)
field("abort__missing", "uint16", "Missing")
-- HELLO, HELLO_ACK
field("hello__nonce", "bytes", "Join nonce")
field("hello__challenge", "bytes", "Own challenge")
field("hello__echo", "bytes", "Echoed challenge")
field("hello__config", "uint64", "Config digest", base.HEX)
field("hello__generation", "uint64", "Generation")
field("hello__payload", "uint16", "Payload size")
field("hello__lanes", "uint8", "Lanes")
field("hello__sealing", "uint8", "Sealing", base.DEC, SEALINGS)
field("hello__phase", "uint8", "Phase")
field("hello__flags", "uint8", "Hello flags", base.HEX)
field("hello__unknown_start", "bool", "Unknown start of the receiver", 8, nil, 1)
field("hello__probe", "uint16", "Largest datagram that came (bytes)")
field("hello__view", "uint32", "View", base.HEX)
field("hello__padding", "bytes", "Padding")

for _, one in pairs(f) do table.insert(sluice.fields, one) end

local too_short = ProtoExpert.new("sluice.too_short", "Payload too short for its type", expert.group.MALFORMED,
                                  expert.severity.ERROR)
sluice.experts = { too_short }

local function is_set(value, bit) return math.floor(value / 2 ^ bit) % 2 == 1 end

-- Adds `names` (field, bytes) one after the other; returns the offset behind the last, or nil when the payload ends
-- before.
local function add_all(tree, payload, at, names)
  for _, pair in ipairs(names) do
    if at + pair[2] > payload:len() then
      tree:add_proto_expert_info(too_short)
      return nil
    end
    tree:add_le(f[pair[1]], payload(at, pair[2]))
    at = at + pair[2]
  end
  return at
end

local function add_bitmap(tree, payload, at)
  local length = payload:len() - at
  if length <= 0 then return end
  local bytes, ones = payload(at, length), 0
  for i = 0, length - 1 do
    local value = bytes(i, 1):uint()
    while value > 0 do
      ones = ones + value % 2
      value = math.floor(value / 2)
    end
  end
  tree:add(f.bitmap, bytes)
  tree:add(f.bitmap__ones, bytes, ones):set_generated()
end

-- A PULL does not name its wire type: the one that makes values and list fill the payload is the right one.
local function values_of_pull(payload, elements, has_list)
  local length = payload:len()
  if not has_list then return length end
  for _, size in ipairs({ 4, 2, 8, 1 }) do
    local values = elements * size
    if values + 2 <= length and length - values == 2 + 2 * payload(values, 2):le_uint() then return values end
  end
  return nil
end

local function dissect_pull(tree, payload, header)
  local has_list = not (is_set(header.flags, 5) or is_set(header.flags, 6) or is_set(header.flags, 7))
  local values = values_of_pull(payload, header.elements, has_list)
  if values == nil then
    tree:add_proto_expert_info(too_short)
    return
  end
  if values > 0 then tree:add(f.values, payload(0, values)) end
  if not has_list then return end
  tree:add_le(f.verdict__count, payload(values, 2))
  for at = values + 2, payload:len() - 2, 2 do tree:add_le(f.verdict__sender, payload(at, 2)) end
end

local dissect = {}
dissect[PING] = function(tree, payload)
  local at = add_all(tree, payload, 0, {
    { "done", 4 }, { "base", 4 }, { "ping__pulse_done", 4 }, { "echo", 4 }, { "hold", 4 }, { "grant", 4 },
    { "ping__policy", 4 }, { "ping__flags", 4 },
  })
  if at and payload:len() > at then tree:add(f.ping__record, payload(at)) end
end
dissect[PONG] = dissect[PING]
dissect[ANNOUNCE] = function(tree, payload)
  if add_all(tree, payload, 0, { { "announce__age", 4 }, { "done", 4 }, { "base", 4 }, { "announce__flags", 4 } }) then
    tree:add_le(f.announce__contributes, payload(12, 4))
    tree:add_le(f.announce__receives, payload(12, 4))
  end
end
dissect[PUSH] = function(tree, payload)
  if payload:len() > 0 then tree:add(f.values, payload(0)) end
end
dissect[PUSH2] = dissect[PUSH]
dissect[PULL] = dissect_pull
dissect[PULL2] = dissect_pull
dissect[REQUEST] = function(tree, payload)
  local at = add_all(tree, payload, 0, { { "done", 4 }, { "base", 4 } })
  if at then add_bitmap(tree, payload, at) end
end
dissect[REQUEST_ROW] = dissect[REQUEST]
dissect[ROW] = function(tree, payload) add_bitmap(tree, payload, 0) end
dissect[FEEDBACK] = function(tree, payload)
  if add_all(tree, payload, 0, { { "echo", 4 }, { "hold", 4 }, { "grant", 4 }, { "feedback__flags", 4 } }) then
    tree:add_le(f.feedback__ecn, payload(12, 4))
  end
end
dissect[GONE] = function(tree, payload) add_all(tree, payload, 0, { { "base", 4 } }) end
dissect[ABORT] = function(tree, payload)
  local at = add_all(tree, payload, 0, {
    { "abort__reason", 2 }, { "abort__count", 2 }, { "abort__kind", 1 }, { "abort__element_type", 1 },
    { "abort__wire_type", 1 },
  })
  at = at and add_all(tree, payload, 8, { { "abort__elements", 8 }, { "abort__tag", 8 } })
  if not at then return end
  for _ = 1, payload(2, 2):le_uint() do
    at = add_all(tree, payload, at, { { "abort__missing", 2 } })
    if not at then return end
  end
end
dissect[HELLO] = function(tree, payload)
  local at = add_all(tree, payload, 0, {
    { "hello__nonce", 16 }, { "hello__challenge", 16 }, { "hello__echo", 16 }, { "hello__config", 8 },
    { "hello__generation", 8 }, { "hello__payload", 2 }, { "hello__lanes", 1 }, { "hello__sealing", 1 },
    { "hello__phase", 1 }, { "hello__flags", 1 }, { "hello__probe", 2 }, { "hello__view", 4 },
  })
  if not at then return end
  tree:add(f.hello__unknown_start, payload(69, 1))
  if payload:len() > 80 then tree:add(f.hello__padding, payload(80)) end
end
dissect[HELLO_ACK] = dissect[HELLO]

local IS_HELLO = { [HELLO] = true, [HELLO_ACK] = true }
local NAMES_RECEIVER = { [HELLO] = true, [HELLO_ACK] = true, [PING] = true, [PONG] = true, [FEEDBACK] = true }
local NAMES_SUBJECT = { [HELLO] = true, [HELLO_ACK] = true, [ROW] = true }
local HAS_KIND = { [PUSH] = true, [ANNOUNCE] = true, [REQUEST] = true, [PUSH2] = true }
local MAY_BE_EMPTY = { [PUSH] = true, [PULL] = true, [ROW] = true, [PUSH2] = true, [PULL2] = true }
local HAS_OP = {
  [ANNOUNCE] = true, [PUSH] = true, [PULL] = true, [REQUEST] = true, [REQUEST_ROW] = true, [ROW] = true, [GONE] = true,
  [ABORT] = true, [PUSH2] = true, [PULL2] = true,
}

local function add_flags(tree, range, type)
  local flags = tree:add(f.flags, range)
  flags:add(f.flags__tail, range)
  flags:add(f.flags__class, range)
  flags:add(f.flags__encoded, range)
  if HAS_KIND[type] then
    flags:add(f.flags__kind, range)
    flags:add(f.flags__wire_type, range)
  elseif type == PULL or type == PULL2 then
    flags:add(f.flags__nonfinite, range)
    flags:add(f.flags__all_counted, range)
    flags:add(f.flags__skip, range)
    flags:add(f.flags__row, range)
  end
end

local function summary(header, buffer)
  local text = TYPES[header.type] or "type " .. header.type
  if IS_HELLO[header.type] then
    return text .. " node " .. buffer(30, 2):le_uint() .. " to " .. buffer(20, 2):le_uint()
  end
  text = text .. " from " .. header.sender
  if NAMES_RECEIVER[header.type] then text = text .. " to " .. buffer(20, 2):le_uint() end
  if HAS_OP[header.type] then
    local op = buffer(16, 4):le_uint()
    text = text .. (op >= 2 ^ 31 and " daemons' op " .. op - 2 ^ 31 or " op " .. op)
    text = text .. " shard " .. buffer(20, 2):le_uint()
    if header.type == PUSH or header.type == PULL then
      text = text .. " block " .. buffer(24, 3):le_uint() .. "/" .. buffer(27, 3):le_uint()
    end
  end
  if is_set(header.flags, 0) then text = text .. " [tail]" end
  return text
end

function sluice.dissector(buffer, pinfo, root)
  if buffer:len() < HEADER or buffer(0, 1):uint() ~= MAGIC then return 0 end
  local header = {
    type = buffer(2, 1):uint(),
    flags = buffer(3, 1):uint(),
    sender = buffer(4, 2):le_uint(),
    elements = buffer(22, 2):le_uint(),
  }
  pinfo.cols.protocol = "Sluice"
  pinfo.cols.info = summary(header, buffer)

  local tree = root:add(sluice, buffer(), "Sluice " .. summary(header, buffer))
  tree:add(f.magic, buffer(0, 1))
  tree:add(f.version, buffer(1, 1))
  tree:add(f.type, buffer(2, 1))
  add_flags(tree, buffer(3, 1), header.type)
  tree:add_le(f.sender, buffer(4, 2))
  tree:add(f.lane, buffer(6, 1))
  tree:add(f.policy, buffer(7, 1))
  tree:add_le(f.job, buffer(8, 4))
  tree:add_le(f.epoch, buffer(12, 4))
  tree:add_le(f.op, buffer(16, 4)):add_le(f.op__daemon, buffer(16, 4))
  tree:add_le(NAMES_RECEIVER[header.type] and f.receiver or f.shard, buffer(20, 2))
  tree:add_le(f.elements, buffer(22, 2))
  tree:add_le(f.block, buffer(24, 3))
  tree:add_le(f.total, buffer(27, 3))
  tree:add_le(NAMES_SUBJECT[header.type] and f.subject or f.ranks, buffer(30, 2))
  tree:add_le(f.fingerprint, buffer(32, 4))
  tree:add_le(f.stamp, buffer(36, 4))
  tree:add_le(f.counter, buffer(40, 8)):add_le(f.phase, buffer(44, 4))

  -- HELLO and HELLO_ACK are tagged whatever the sealing is.
  local tag = (IS_HELLO[header.type] or sluice.prefs.tagged) and TAG or 0
  if buffer:len() < HEADER + tag then
    tree:add_proto_expert_info(too_short)
    return buffer:len()
  end
  local length = buffer:len() - HEADER - tag
  if length > 0 then
    local payload_tree = tree:add(f.payload, buffer(HEADER, length))
    local part = dissect[header.type]
    if part then part(payload_tree, buffer(HEADER, length):tvb(), header) end
  elseif not MAY_BE_EMPTY[header.type] then
    tree:add_proto_expert_info(too_short)
  end
  if tag > 0 then tree:add(f.tag, buffer(HEADER + length, tag)) end
  return buffer:len()
end

-- Three bytes would fit one foreign datagram in a million; what every type has in common makes it rarer still.
local function looks_like_sluice(buffer, pinfo, root)
  if buffer:len() < HEADER or buffer(0, 1):uint() ~= MAGIC or buffer(1, 1):uint() ~= VERSION then return false end
  local type, sender = buffer(2, 1):uint(), buffer(4, 2):le_uint()
  if TYPES[type] == nil then return false end
  if IS_HELLO[type] ~= nil then
    if sender ~= 65535 or buffer:len() < HEADER + 80 + TAG then return false end
  elseif sender >= 1024 or buffer(40, 8):le_uint64() == UInt64(0) then
    return false
  end
  sluice.dissector(buffer, pinfo, root)
  return true
end

sluice:register_heuristic("udp", looks_like_sluice)
DissectorTable.get("udp.port"):add_for_decode_as(sluice)
