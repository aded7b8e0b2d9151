-- abandon: leased -> queued for jobs that this worker holds without knowing: the reply of a lease was lost, or the
-- job's own task ended the worker by an error, which may charge it (`handed_back` in _common.lua).
-- KEYS: jobs:LANE
-- ARGV: prefix, lane, worker, error that ends the worker ('' for none), then the jobs it knows
-- Returns: jobs released
-- Atomic because the pending and the known jobs must be compared in one instant.
local lane_key = KEYS[1]
local prefix, lane, worker, death = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local first_known = 5

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
    local key = group_key_of(prefix, job)
    local g = redis.call('HMGET', key, 'st', 'eid', 'own')
    if not known[job] and g[1] == 'leased' and g[2] == p[1] and g[3] == worker then
      local body = take_entry(prefix, lane, p[1])
      if death == '' then end_try(key, 'unheard') else end_try(key, 'died') end
      handed_back(prefix, job, lane, body, worker, death)
      released[#released + 1] = job
    end
  end
end
return released
