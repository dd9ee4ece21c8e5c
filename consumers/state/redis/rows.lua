-- The functions of the Redis store that read and swap small rows. What is decided is in consumers/state/rows.py. The rows
-- of a place are a hash; a single row, whose name is empty, is a string.
local function read(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'string' then return {'', redis.call('GET', key)} end
  return kind == 'hash' and redis.call('HGETALL', key) or {}
end

-- Swaps the rows of places that are as the caller expects them. `at`: when it decided. Returns the time, and for each
-- place 1, or how long its rows are kept and what they are, if they are others or the decision is older than `stale_ms`.
-- The arguments for each place, after these two: what is expected (names and values, joined by zero bytes), until when
-- the rows are kept (nothing: as before), the number of arguments for changes, and these: names and values (nothing: the
-- row is removed).
function run.swap_rows(at, stale_ms)
  local next, results = 3, {now}
  for k, key in ipairs(KEYS) do
    local expected, until_ms, changes = unpack(ARGV, next, next + 2)
    local found = read(key)
    if table.concat(found, '\0') ~= expected or math.abs(now - at) > tonumber(stale_ms) then
      table.insert(found, 1, redis.call('PTTL', key))
      results[k + 1] = found
    else
      for i = next + 3, next + 2 + changes, 2 do
        local name, value = ARGV[i], ARGV[i + 1]
        if name == '' then
          redis.call('SET', key, value)  -- `until_ms` is given
        elseif value == '' then
          redis.call('HDEL', key, name)
        else
          redis.call('HSET', key, name, value)
        end
      end
      if until_ms ~= '' then redis.call('PEXPIREAT', key, until_ms) end
      results[k + 1] = 1
    end
    next = next + 3 + changes
  end
  return results
end
