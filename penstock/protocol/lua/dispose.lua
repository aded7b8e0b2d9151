-- dispose: a subscription (or its pool) will not use these ready groups: too old, filtered, rewound (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, reason, code (negative), then for each group
--       job, samples and generated tokens that count as given up for their age (0, 0: for another reason)
-- Returns: number disposed of, or -1 when the leadership is lost
-- Atomic because the place at the gate is freed exactly once (u goes from unused to the code). A group that was used
-- and has uses left loses them; its place was consumed by its first use.
local prefix, disposed, places, samples, tokens = ARGV[1], 0, 0, 0, 0
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local used = 'u:' .. account_of(KEYS[2], ARGV[4])
for i = 7, #ARGV, 3 do
  local key = group_key(prefix, ARGV[i])
  local g = redis.call('HMGET', key, 'st', used)
  if g[1] == 'ready' and tonumber(g[2] or 0) >= 0 then
    if not g[2] then places = places + 1 end
    redis.call('HSET', key, used, ARGV[6])
    disposed = disposed + 1
    samples, tokens = samples + tonumber(ARGV[i + 1]), tokens + tonumber(ARGV[i + 2])
  end
end
if disposed > 0 then
  redis.call('HINCRBY', KEYS[2], 'disposed', places)
  redis.call('HINCRBY', KEYS[2], 'drop:' .. ARGV[5], disposed)
  if samples > 0 then
    redis.call('HINCRBY', KEYS[2], 'aged_samples', samples)
    redis.call('HINCRBY', KEYS[2], 'aged_tokens', tokens)
  end
  poke(prefix .. 'gate')
end
return disposed
