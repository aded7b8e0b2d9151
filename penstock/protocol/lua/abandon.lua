-- abandon: leased -> queued for jobs that this worker holds without knowing (the reply of a lease was lost).
-- KEYS: jobs:LANE
-- ARGV: prefix, lane, worker, then the jobs it knows
-- Returns: jobs released
-- Atomic because what is pending and what is known must be compared in one instant.
local lane_key = KEYS[1]
local prefix, lane, worker = ARGV[1], ARGV[2], ARGV[3]
local first_known = 4

freeing(prefix)
local known = {}
for i = first_known, #ARGV do known[ARGV[i]] = true end
local released = {}
for _, p in ipairs(redis.call('XPENDING', lane_key, GROUP, '-', '+', 1000, worker)) do
  local found = redis.call('XRANGE', lane_key, p[1], p[1])
  if #found == 0 then
    redis.call('XACK', lane_key, GROUP, p[1])
  else
    local job = field(found[1][2], 'id')
    local g = redis.call('HMGET', group_key_of(prefix, job), 'st', 'eid', 'own', 'nb')
    if not known[job] and g[1] == 'leased' and g[2] == p[1] and g[3] == worker then
      local body = take_entry(prefix, lane, p[1])
      end_try(group_key_of(prefix, job), 'unheard')
      leave_inflight(prefix, job)
      put_entry(prefix, lane == 'suspect' and 'suspect' or 'resume', job, g[4], body)
      count(prefix, 'released')
      released[#released + 1] = job
    end
  end
end
return released
