-- relay_claim: a range that a worker may fetch from the trainer itself, because no peer has it (worker).
-- KEYS: relay:OBJECT, relay_peers:OBJECT, relay_slot:OBJECT:1, relay_slot:OBJECT:2, relay_taken:OBJECT
-- ARGV: prefix, object, worker, how long in ms the claim holds, number of ranges, range that its peers have and failed
--       to send (-1: none): it may be claimed when all others are taken
-- Returns: the range; -1: both slots are taken, there is nothing left to claim, or no offer
-- Atomic because two workers must not be given the same range, nor a third one a slot: the trainer's link carries the
-- claimed ranges.
local relay_key, peers_key, slot_key, other_slot_key, taken_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local prefix, object, worker, claim_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local num_ranges, wanted = tonumber(ARGV[5]), tonumber(ARGV[6])

freeing(prefix)
if redis.call('EXISTS', relay_key) == 0 then return -1 end
local free, claimed = nil, {}
for _, key in ipairs({slot_key, other_slot_key}) do
  cap_lease(key, claim_ms)
  local holder, range = string.match(redis.call('GET', key) or '', '^(.*) (%d+)$')
  if holder == worker then
    redis.call('PEXPIRE', key, claim_ms)
    return tonumber(range)
  end
  if holder then claimed[#claimed + 1] = tonumber(range) else free = free or key end
end
if not free then return -1 end

-- a peer whose record expired is gone, and the ranges that only it had are assigned again, like those of no worker
local longest = math.ceil(num_ranges / 8)
redis.call('DEL', taken_key)
for _, peer in ipairs(redis.call('HKEYS', peers_key)) do
  local have_key = prefix .. 'relay_have:' .. object .. ':' .. peer
  local length = redis.call('STRLEN', have_key)
  if length > 0 and length <= longest then redis.call('BITOP', 'OR', taken_key, taken_key, have_key)
  else redis.call('HDEL', peers_key, peer) end
end
for _, range in ipairs(claimed) do redis.call('SETBIT', taken_key, range, 1) end
local range, is_taken = redis.call('BITPOS', taken_key, 0), false
redis.call('DEL', taken_key)
if range < 0 or range >= num_ranges then range = wanted end
for _, other in ipairs(claimed) do is_taken = is_taken or other == range end
if range < 0 or is_taken then return -1 end
redis.call('SET', free, worker .. ' ' .. string.format('%.0f', range), 'PX', claim_ms)
return range
