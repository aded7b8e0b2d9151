-- recount: invariant I1 in one instant (audit).
-- KEYS: counters, delayed, dead, ready, then jobs:LANE of every lane
-- ARGV: none
-- Returns: {admitted, in lanes, delayed, dead, ready, retired, evicted, dropped, cancelled}
-- Atomic because jobs move while one counts.
local c = redis.call('HMGET', KEYS[1], 'admitted', 'retired', 'evicted', 'dropped', 'cancelled')
local lanes = 0
for i = 5, #KEYS do lanes = lanes + redis.call('XLEN', KEYS[i]) end
return {tonumber(c[1] or 0), lanes, redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3]),
  redis.call('ZCARD', KEYS[4]), tonumber(c[2] or 0), tonumber(c[3] or 0), tonumber(c[4] or 0), tonumber(c[5] or 0)}
