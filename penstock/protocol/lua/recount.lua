-- recount: invariant I1 in one instant (audit).
-- KEYS: counters, delayed, dead, ready, then jobs:LANE of every lane
-- ARGV: none
-- Returns: {admitted, in lanes, delayed, dead, kept, retired, evicted, dropped, cancelled}
-- Atomic because jobs move meanwhile.
local counters_key, delayed_key, dead_key, ready_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local first_lane_key = 5

local c = redis.call('HMGET', counters_key, 'admitted', 'retired', 'evicted', 'dropped', 'cancelled')
local lanes = 0
for i = first_lane_key, #KEYS do lanes = lanes + redis.call('XLEN', KEYS[i]) end
return {tonumber(c[1] or 0), lanes, redis.call('ZCARD', delayed_key), redis.call('XLEN', dead_key),
  redis.call('ZCARD', ready_key), tonumber(c[2] or 0), tonumber(c[3] or 0), tonumber(c[4] or 0), tonumber(c[5] or 0)}
