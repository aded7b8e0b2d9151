-- renew: leased -> leased (worker's heartbeat).
-- KEYS: counters (unused; it names the hash slot)
-- ARGV: prefix, worker, then per job: job, token
-- Returns: jobs whose lease is lost; the worker must stop them and write nothing.
-- Atomic because a bare XCLAIM from a worker that lost its lease would steal the job back.
local prefix, worker = ARGV[1], ARGV[2]
local first_lease = 3

freeing(prefix)
local lost = {}
for i = first_lease, #ARGV, 2 do
  local job, token = ARGV[i], ARGV[i + 1]
  local g = redis.call('HMGET', group_key_of(prefix, job), 'st', 'tok', 'cl', 'eid')
  local mine = g[1] == 'leased' and g[2] == token
  if mine then
    mine = #redis.call('XCLAIM', lane_key_of(prefix, g[3]), GROUP, worker, 0, g[4], 'JUSTID') > 0
  end
  if not mine then lost[#lost + 1] = job end
end
return lost
