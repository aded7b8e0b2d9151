-- schema: return the schema of the run's records (before reading or writing them; read-only).
-- KEYS: schema (unused; it names the hash slot)
-- ARGV: prefix
-- Returns: {schema of the run (0: none, -1: it cannot be read), schema of the caller}; the caller's twice if the run
-- has not begun
-- Atomic because a run that begins meanwhile must not look like one without a schema.
local prefix = ARGV[1]

return {schema_of(prefix) or SCHEMA, SCHEMA}
