-- dispose: a subscription (or its pool) will not use these ready groups: stale, filtered, rewound (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, reason, code (negative), then for each group
--       job, samples and generated tokens that count as stale (0, 0: for another reason), staleness
-- Returns: number disposed of (0 if the subscription was dropped meanwhile), or -1 when the leadership is lost
-- Atomic because the place at the gate is freed exactly once (u goes from unused to the code). A group that was used
-- and has uses left loses them; its place was consumed by its first use.
local leader_key, sub_key = KEYS[1], KEYS[2]
local prefix, epoch, token, sub, reason, code = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local first_group = 7

local disposed, freed, samples, tokens, staleness = 0, 0, 0, 0, 0
freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if redis.call('EXISTS', sub_key) == 0 then return 0 end
local used = 'u:' .. account_of(sub_key, sub)
for i = first_group, #ARGV, 4 do
  local key, aged_samples, aged_tokens = group_key_of(prefix, ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local g = redis.call('HMGET', key, 'st', used)
  if g[1] == 'ready' and tonumber(g[2] or 0) >= 0 then
    if not g[2] then freed = freed + 1 end
    redis.call('HSET', key, used, code)
    disposed = disposed + 1
    samples, tokens = samples + tonumber(aged_samples), tokens + tonumber(aged_tokens)
    staleness = staleness + tonumber(ARGV[i + 3])
  end
end
if disposed > 0 then
  redis.call('HINCRBY', sub_key, 'disposed', freed)
  redis.call('HINCRBY', sub_key, 'drop:' .. reason, disposed)
  redis.call('HINCRBY', sub_key, 'staleness:' .. reason, staleness)
  if samples > 0 then
    redis.call('HINCRBY', sub_key, 'aged_samples', samples)
    redis.call('HINCRBY', sub_key, 'aged_tokens', tokens)
  end
  poke(prefix .. 'gate')
end
return disposed
