-- identify: record the data in which positions of the source are counted (producer, at its start).
-- KEYS: source
-- ARGV: prefix, fingerprint of the prompts, then field, number of further facts about them
-- Returns: the valid fingerprint: the first one given; numbers are written only if it is the caller's
-- Atomic because two producers that start together must not both be the first.
local source_key = KEYS[1]
local prefix, fingerprint = ARGV[1], ARGV[2]
local first_number = 3

freeing(prefix)
redis.call('HSETNX', source_key, 'fingerprint', fingerprint)
local first = redis.call('HGET', source_key, 'fingerprint')
if first == fingerprint then
  for i = first_number, #ARGV, 2 do redis.call('HSET', source_key, ARGV[i], ARGV[i + 1]) end
end
return first
