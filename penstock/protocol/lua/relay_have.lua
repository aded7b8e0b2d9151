-- relay_have: record which ranges of an object a worker has and serves, and which it fetches from the trainer (worker,
-- with each range that it gets, and periodically).
-- KEYS: relay_peers:OBJECT, relay_have:OBJECT:WORKER, relay_slot:OBJECT:1, relay_slot:OBJECT:2
-- ARGV: prefix, worker, url, bitmap of ranges, how long in ms this holds unless it is renewed, range that it claims
--       still (-1: none), how long in ms a claim holds
-- Returns: 1
-- Atomic because a range must be announced before its claim ends: otherwise it would be assigned again in between.
local peers_key, have_key, slot_key, other_slot_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local prefix, worker, url, bitmap, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local claim, claim_ms = ARGV[6], ARGV[7]

freeing(prefix)
redis.call('SET', have_key, bitmap, 'PX', ttl_ms)
redis.call('HSET', peers_key, worker, url)
redis.call('PEXPIRE', peers_key, ttl_ms)
for _, key in ipairs({slot_key, other_slot_key}) do
  local holder, range = string.match(redis.call('GET', key) or '', '^(.*) (%d+)$')
  if holder == worker and range == claim then redis.call('PEXPIRE', key, claim_ms)
  elseif holder == worker then redis.call('DEL', key) end
end
return 1
