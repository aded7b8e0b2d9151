-- identify: what the positions of the source are counted in (producer, at its start).
-- KEYS: source
-- ARGV: prefix, fingerprint of the prompts, then field, number of what others want to know of them
-- Returns: the fingerprint that counts: the first one that was told; numbers are written only where it is the caller's
-- Atomic because two producers that start together must not both be the first.
freeing(ARGV[1])
redis.call('HSETNX', KEYS[1], 'fingerprint', ARGV[2])
local first = redis.call('HGET', KEYS[1], 'fingerprint')
if first == ARGV[2] then
  for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
return first
