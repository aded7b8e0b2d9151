-- copied: the trainer's copy of the newest version is verified and served from its memory (the trainer's driver).
-- KEYS: clock, sub:NAME, copied:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, record
-- Returns: 'copied' | 'already' | 'owner' | 'version' (it is not the newest that was announced)
-- Atomic because a number above the clock names no weights yet, and another owner may publish others under it (T1).
local clock_key, sub_key, copied_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, owner, gen, clock_field, version, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

freeing(prefix)
if not owns(sub_key, owner, gen) then return 'owner' end
if version < 1 or version ~= tonumber(redis.call('HGET', clock_key, clock_field) or 0) then return 'version' end
if redis.call('GET', copied_key) == record then return 'already' end
redis.call('SET', copied_key, record)
return 'copied'
