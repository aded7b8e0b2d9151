-- ready_groups: count the groups of each lane that a batch may still take.
-- KEYS: ready, subs
-- ARGV: prefix
-- Returns: {lane, count, ...}; a group of a lane without a subscription counts until it is collected. Reads only;
-- invalid
--          entries are skipped
-- Atomic because groups are cut meanwhile: a group is ready for `penstock status` as long as it is for the cut.
local ready_key, subs_key = KEYS[1], KEYS[2]
local prefix = ARGV[1]

local readers = {} -- lane -> subscriptions that take its groups
for _, name in ipairs(redis.call('HKEYS', subs_key)) do
  if string.sub(name, 1, 4) == 'sub:' then
    local s = redis.pcall('HMGET', prefix .. name, 'lanes', 'reuse', 'share')
    if not s.err and s[1] then
      local share = s[3] and s[3] ~= '' and 'share:' .. s[3]
      local reader = {used = 'u:' .. (share or string.sub(name, 5)), reuse = tonumber(s[2] or 1) or 1}
      for lane in string.gmatch(s[1], '[^,]+') do
        readers[lane] = readers[lane] or {}
        table.insert(readers[lane], reader)
      end
    end
  end
end

local function is_open(key, lane)
  if not readers[lane] then return true end
  for _, reader in ipairs(readers[lane]) do
    local uses = tonumber(redis.call('HGET', key, reader.used) or 0) or 0
    if uses >= 0 and uses < reader.reuse then return true end
  end
  return false
end

local counts, answer = {}, {}
for _, job in ipairs(redis.call('ZRANGE', ready_key, 0, -1)) do
  local key = group_key_of(prefix, job)
  local lane = redis.pcall('HGET', key, 'ln')
  if type(lane) == 'string' and is_open(key, lane) then counts[lane] = (counts[lane] or 0) + 1 end
end
for lane, count in pairs(counts) do
  answer[#answer + 1], answer[#answer + 2] = lane, count
end
return answer
