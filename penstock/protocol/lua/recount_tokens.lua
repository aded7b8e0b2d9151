-- recount_tokens: invariant I10 in one instant (audit).
-- KEYS: tokens, delayed, ready, then jobs:LANE of every lane
-- ARGV: prefix
-- Returns: {fields and values of the ledger, flat; home lanes and the tokens that their live groups hold, flat}
-- Atomic because tokens move meanwhile. Takes some microseconds for each live group.
local tokens_key, delayed_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local first_lane_key = 4
local prefix = ARGV[1]

local held = {}
local function add(job)
  local key = group_key_of(prefix, job)
  local lane = redis.call('HGET', key, 'ln')
  if lane then held[lane] = (held[lane] or 0) + held_by(key) end
end
local function add_lane(key)
  local from = '-'
  while true do
    local entries = redis.call('XRANGE', key, from, '+', 'COUNT', 256)
    for _, entry in ipairs(entries) do
      local job = field(entry[2], 'id')
      if job then add(job) end
    end
    if #entries < 256 then return end
    from = '(' .. entries[#entries][1]
  end
end

for i = first_lane_key, #KEYS do add_lane(KEYS[i]) end
for _, key in ipairs({delayed_key, ready_key}) do
  for _, job in ipairs(redis.call('ZRANGE', key, 0, -1)) do add(job) end
end
local flat = {}
for lane, tokens in pairs(held) do
  flat[#flat + 1] = lane
  flat[#flat + 1] = tostring(tokens)
end
return {redis.call('HGETALL', tokens_key), flat}
