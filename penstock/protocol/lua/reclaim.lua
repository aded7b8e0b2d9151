-- reclaim: leased -> queued for leases that nobody renewed (one elected reclaimer).
-- KEYS: reclaimer, jobs:LANE
-- ARGV: prefix, lane, reclaimer's token, lease in ms, most jobs
-- Returns: list of {job, worker, where it went}, or 'contact' | 'elected' when it is not the caller's turn
-- Atomic because a lease that is renewed meanwhile must not be taken. Waits one lease after unbroken contact
-- began, or the first comer after an outage would take every lease that could not be renewed meanwhile.
local prefix, lane, lease = ARGV[1], ARGV[2], tonumber(ARGV[4])
freeing(prefix)
local elected = redis.call('GET', KEYS[1])
if elected and elected ~= ARGV[3] then return 'elected' end
redis.call('SET', KEYS[1], ARGV[3], 'PX', math.max(2000, lease))
if contact(prefix, 'reclaim', lease / 2) <= lease then return 'contact' end
local moved = {}
for _, p in ipairs(redis.call('XPENDING', KEYS[2], GROUP, 'IDLE', lease, '-', '+', ARGV[5])) do
  local found = redis.call('XRANGE', KEYS[2], p[1], p[1])
  local job = #found > 0 and field(found[1][2], 'id')
  local g = job and redis.call('HMGET', group_key(prefix, job), 'st', 'eid') or {}
  if g[1] == 'leased' and g[2] == p[1] then
    local body = take_entry(prefix, lane, p[1])
    local where = crashed(prefix, job, lane, body, 'the lease of worker ' .. p[2] .. ' ran out', p[2], true, '')
    count(prefix, 'reclaimed')
    moved[#moved + 1] = {job, p[2], where}
  else
    redis.call('XACK', KEYS[2], GROUP, p[1])
  end
end
return moved
