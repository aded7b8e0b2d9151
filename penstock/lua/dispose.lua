-- dispose: a subscription will not use these ready groups: too old, filtered, rewound (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, reason, code (negative), then jobs
-- Returns: number disposed of, or -1 when the leadership is lost
-- Atomic because the place at the gate is freed exactly once (u goes from unused to the code).
local prefix, used, disposed = ARGV[1], 'u:' .. ARGV[4], 0
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
for i = 7, #ARGV do
  local key = group_key(prefix, ARGV[i])
  if redis.call('HGET', key, 'st') == 'ready' and redis.call('HSETNX', key, used, ARGV[6]) == 1 then
    disposed = disposed + 1
  end
end
if disposed > 0 then
  redis.call('HINCRBY', KEYS[2], 'disposed', disposed)
  redis.call('HINCRBY', KEYS[2], 'drop:' .. ARGV[5], disposed)
  poke(prefix .. 'gate')
end
return disposed
