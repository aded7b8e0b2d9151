-- reclaim: end leases that were not renewed; leased -> resume, suspect or dead (`crashed` in _common.lua). One elected
-- reclaimer.
-- KEYS: reclaimer, jobs:LANE
-- ARGV: prefix, lane, reclaimer's token, lease in ms, most jobs
-- Returns: list of {job, worker, where it went}, or 'contact' | 'elected' when it is not the caller's turn
-- Atomic because a lease that is renewed meanwhile must not be taken. Waits one lease after unbroken contact
-- began, or the first caller after an outage would take every lease that could not be renewed meanwhile.
local reclaimer_key, lane_key = KEYS[1], KEYS[2]
local prefix, lane, token, lease_ms, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

freeing(prefix)
local elected = redis.call('GET', reclaimer_key)
if elected and elected ~= token then return 'elected' end
redis.call('SET', reclaimer_key, token, 'PX', math.max(2000, lease_ms))
if contact(prefix, 'reclaim', lease_ms / 2) <= lease_ms then return 'contact' end
local moved = {}
for _, p in ipairs(redis.call('XPENDING', lane_key, GROUP, 'IDLE', lease_ms, '-', '+', most)) do
  local found = redis.call('XRANGE', lane_key, p[1], p[1])
  local job = #found > 0 and field(found[1][2], 'id')
  local g = job and redis.call('HMGET', group_key_of(prefix, job), 'st', 'eid') or {}
  if g[1] == 'leased' and g[2] == p[1] then
    local body = take_entry(prefix, lane, p[1])
    end_try(group_key_of(prefix, job), 'reclaimed')
    unhear(prefix, group_key_of(prefix, job))
    local where = crashed(prefix, job, lane, body, 'the lease of worker ' .. p[2] .. ' ran out', p[2], true, '')
    count(prefix, 'reclaimed')
    moved[#moved + 1] = {job, p[2], where}
  else
    redis.call('XACK', lane_key, GROUP, p[1])
  end
end
return moved
