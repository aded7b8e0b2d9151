-- whole: the folder of an announced version is complete, verified and synced (the trainer's driver, after the
-- announcement).
-- KEYS: clock, sub:NAME, whole:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, record
-- Returns: 'whole' | 'already' | 'owner' | 'version' (it was not announced)
-- Atomic because a number above the clock names no weights yet, and another owner may publish others under it (T1).
local clock_key, sub_key, whole_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, owner, gen, clock_field, version, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

freeing(prefix)
if not owns(sub_key, owner, gen) then return 'owner' end
local clock = tonumber(redis.call('HGET', clock_key, clock_field) or 0)
if version < 1 or version > clock then return 'version' end
if redis.call('HGET', whole_key, version) == record then return 'already' end
redis.call('HSET', whole_key, version, record)
-- as many as there are publications to load
for _, old in ipairs(redis.call('HKEYS', whole_key)) do
  if tonumber(old) <= clock - 256 then redis.call('HDEL', whole_key, old) end
end
return 'whole'
