-- The local functions that requests.lua and following.lua share, which read and write a request. A request has three
-- Redis keys: for its claim and result, for its submission, and for its entries. The key for its claim and result is a
-- hash, whose fields are like the columns of the table `request` in sqlite/file.py; an empty field means NULL.
local request, followed, entries = KEYS[1], KEYS[2], KEYS[3]
local FIELDS = {
  'hash', 'mark', 'token', 'nonce', 'deaths', 'lease', 'claimed', 'attempts', 'noted', 'cancelling', 'due',
  'status', 'code', 'ended',
}
local function read(key)
  local values, row = redis.call('HMGET', key, unpack(FIELDS)), {}
  if not values[3] then return nil end
  for i, name in ipairs(FIELDS) do row[name] = values[i] or '' end
  row.token, row.lease, row.deaths = tonumber(row.token), tonumber(row.lease), tonumber(row.deaths) or 0
  row.cancelling = row.cancelling == '1'
  row.noted = row.noted == '1'
  row.ended_ms, row.ended = row.ended, row.status ~= '' and not row.cancelling
  row.deferred = row.noted and row.status == ''
  return row
end
local function next_token(row) return row and row.token + 1 or now end
-- Writes a request as if it were new. `...`: the fields with other values than those given here, each followed by its
-- value.
local function write_new(row, ...)
  redis.call('HSET', request, 'hash', '', 'mark', '', 'token', next_token(row), 'nonce', '', 'deaths', 0,
    'lease', 0, 'claimed', 0, 'attempts', 0, 'noted', '', 'cancelling', '', 'due', '',
    'status', '', 'code', '', 'headers', '', 'ended', '', 'body', '', ...)
end
local function ending()
  return redis.call('HMGET', request, 'status', 'code', 'headers', 'ended', 'body', 'mark')
end
local function end_as_cancelled(cancelled_ms, ...)
  redis.call('HSET', request, 'lease', 0, 'cancelling', '', ...)
  redis.call('PEXPIRE', request, math.max(redis.call('PTTL', request), tonumber(cancelled_ms)))
end
local function forget_events(key)
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
    if entry[2][1] == 'event' then redis.call('XDEL', key, entry[1]) end
  end
end
local function runs_again(row, dead_at)
  return row.ended and row.status == 'error' and dead_at ~= '' and dead_at == row.ended_ms
end
local function other_body(row, hash) return row.hash ~= '' and row.hash ~= hash end
local function is_held(row, mark, redelivered, nonce)
  local is_own = row.mark == mark and row.nonce:sub(1, 1) == nonce:sub(1, 1)
  return row.lease > now and not (redelivered == '1' and is_own)
end
local function ending_for(row, mark)
  local found = ending()
  if row.mark == '' then redis.call('HSET', request, 'mark', mark) end
  return found
end
local function restart_entries(keep_ms)
  local last = tonumber(redis.call('HGET', followed, 'last'))
  if not last then return end
  -- clients that follow the request have seen its end as entry `last + 1`, so that number is left out
  redis.call('XADD', entries, '0-' .. (last + 2), 'restart', '{}')
  redis.call('HSET', followed, 'last', last + 2, 'events', 0, 'bytes', 0)
  forget_events(entries)
  redis.call('PEXPIRE', followed, keep_ms)
  redis.call('PEXPIRE', entries, keep_ms)
end
