"""The Lua scripts with which the Redis store claims, completes and cancels requests.

A request is a Redis hash; an empty field means what NULL means in SQLite. If Redis has no memory or disk space left, it
refuses the first write of a script, so that a refused script has changed nothing. The scripts take the same decisions
as the methods of `consumers/state/sqlite/requests.py`, which are easier to read.
"""

from typing import Final

from consumers.state.redis.script import CLOCK, Script

REQUEST = (
    CLOCK
    + """
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
  row.over = row.status ~= '' and not row.cancelling
  row.deferred = row.noted and row.status == ''
  return row
end
local function next_token(row) if row then return row.token + 1 end return now end
-- Writes a request as if it were new. Further fields and values replace the empty ones.
local function write_new(key, row, ...)
  redis.call('HSET', key, 'hash', '', 'mark', '', 'token', next_token(row), 'nonce', '', 'deaths', 0,
    'lease', 0, 'claimed', 0, 'attempts', 0, 'noted', '', 'cancelling', '', 'due', '',
    'status', '', 'code', '', 'headers', '', 'ended', '', 'body', '', ...)
end
local function ending(key)
  return redis.call('HMGET', key, 'status', 'code', 'headers', 'ended', 'body', 'mark')
end
local function end_as_cancelled(key, cancelled_ms)
  redis.call('HSET', key, 'lease', 0, 'cancelling', '')
  redis.call('PEXPIRE', key, math.max(redis.call('PTTL', key), tonumber(cancelled_ms)))
end
"""
)
FORGET_EVENTS = """
local function forget_events(entries)
  for _, entry in ipairs(redis.call('XRANGE', entries, '-', '+')) do
    if entry[2][1] == 'event' then redis.call('XDEL', entries, entry[1]) end
  end
end
"""
_COPY = """
local function runs_again(row, dead_at)
  return row.over and row.status == 'error' and dead_at ~= '' and dead_at == row.ended
end
local function other_body(row, hash) return row.hash ~= '' and row.hash ~= hash end
local function ending_for(key, row, mark)
  local found = ending(key)
  if row.mark == '' then redis.call('HSET', key, 'mark', mark) end
  return found
end
local function restart_entries(followed, entries, keep_ms)
  local last = tonumber(redis.call('HGET', followed, 'last'))
  if not last then return end
  -- clients that follow the request have seen its end as entry `last + 1`, so that number is left out
  redis.call('XADD', entries, '0-' .. (last + 2), 'restart', '{}')
  redis.call('HSET', followed, 'last', last + 2, 'events', 0, 'bytes', 0)
  forget_events(entries)
  redis.call('PEXPIRE', followed, keep_ms)
  redis.call('PEXPIRE', entries, keep_ms)
end
local function is_held(row, mark, redelivered, nonce)
  local is_own = row.mark == mark and row.nonce:sub(1, 1) == nonce:sub(1, 1)
  return row.lease > now and not (redelivered == '1' and is_own)
end
"""

CLAIM: Final = Script(
    REQUEST
    + FORGET_EVENTS
    + _COPY
    + """
local key = KEYS[1]
local hash, mark, redelivered, dead_at = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local nonce, lease_ms, keep_ms, cancelled_ms = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local row, attempts, deaths = read(key), 0, 0
if row and not row.noted and not runs_again(row, dead_at) then
  if other_body(row, hash) then return {'conflict'} end
  if row.over then
    return {'ended', (row.mark == '' or row.mark == mark) and 1 or 0, ending_for(key, row, mark)}
  end
  if row.lease > 0 and nonce ~= '' and row.nonce == nonce then
    return {'granted', row.token, row.deaths, redis.call('EXISTS', KEYS[2])}
  end
  if is_held(row, mark, redelivered, nonce) then return {'running', now - tonumber(row.claimed)} end
  if row.cancelling then
    end_as_cancelled(key, cancelled_ms)
    return {'ended', 1, ending(key)}
  end
  attempts, deaths = row.attempts, row.deaths + (row.lease > 0 and 1 or 0)
end
local token = next_token(row)
redis.call('HSET', key, 'hash', hash, 'mark', mark, 'token', token, 'nonce', nonce, 'deaths', deaths,
  'lease', now + lease_ms, 'claimed', now,
  'attempts', attempts, 'noted', '', 'cancelling', '', 'due', '',
  'status', '', 'code', '', 'headers', '', 'ended', '', 'body', '')
redis.call('PEXPIRE', key, keep_ms + lease_ms)
if row and row.over then restart_entries(KEYS[2], KEYS[3], keep_ms) end
return {'granted', token, deaths, row and redis.call('EXISTS', KEYS[2]) or 0}
"""
)
RENEW: Final = Script(
    REQUEST
    + """
local lease_ms, keep_ms = ARGV[1], ARGV[2]
local stops = {}
for i, key in ipairs(KEYS) do
  local row = read(key)
  stops[i] = ''
  if row then
    if row.token ~= tonumber(ARGV[i + 2]) then
      stops[i] = 'fenced'
    else
      if row.cancelling or (row.over and row.code == 'cancelled') then stops[i] = 'cancelled' end
      if not row.over then
        redis.call('HSET', key, 'lease', now + lease_ms)
        redis.call('PEXPIRE', key, keep_ms + lease_ms)
      end
    end
  end
end
return stops
"""
)
RELEASE: Final = Script(
    REQUEST
    + """
local key, token, attempts, due = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]
local keep_ms, cancelled_ms = ARGV[4], ARGV[5]
local row = read(key)
if row and not row.over then
  if row.token ~= token then
    redis.call('HSET', key, 'deaths', math.max(0, row.deaths - 1))
  elseif row.cancelling then
    end_as_cancelled(key, cancelled_ms)
  else
    redis.call('HSET', key, 'lease', 0, 'attempts', attempts, 'due', due)
    redis.call('PEXPIRE', key, keep_ms)
  end
end
"""
)
COMPLETE: Final = Script(
    REQUEST
    + FORGET_EVENTS
    + _COPY
    + """
local key, keep_ms = KEYS[1], ARGV[1]
local hash, mark, redelivered, dead_at, nonce = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local token, status, code, headers, ended, body = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local row = read(key)
if row and row.token == token then
  if row.over then return {'held', ending(key)} end
  redis.call('HSET', key, 'lease', 0, 'cancelling', '',
    'status', status, 'code', code, 'headers', headers, 'ended', ended, 'body', body)
else
  if row and not row.noted and not (not token and runs_again(row, dead_at)) then
    if other_body(row, hash) then return {token and 'fenced' or 'given'} end
    if row.over then return {'held', ending_for(key, row, mark)} end
    if token or is_held(row, mark, redelivered, nonce) then return {'fenced'} end
  end
  write_new(key, row, 'hash', hash, 'mark', mark, 'nonce', nonce, 'claimed', now,
    'status', status, 'code', code, 'headers', headers, 'ended', ended, 'body', body)
  if row and row.over and KEYS[2] then restart_entries(KEYS[2], KEYS[3], keep_ms) end
end
redis.call('PEXPIRE', key, keep_ms)
return {'given'}
"""
)
DEFER: Final = Script(
    REQUEST
    + """
local key, due, keep_until, row = KEYS[1], ARGV[1], ARGV[2], read(KEYS[1])
if row and not row.noted then return row.over and 0 or 1 end
write_new(key, row, 'noted', '1', 'due', due)
redis.call('PEXPIRE', key, keep_until - now)
return 1
"""
)
NOTE: Final = Script(
    REQUEST
    + """
local key, keep_ms, row = KEYS[1], ARGV[1], read(KEYS[1])
if row and not (row.noted and not (row.deferred and row.due ~= '')) then return end
write_new(key, row, 'noted', '1',
  'status', ARGV[2], 'code', ARGV[3], 'headers', ARGV[4], 'ended', ARGV[5], 'body', ARGV[6])
redis.call('PEXPIRE', key, keep_ms)
"""
)
CANCEL: Final = Script(
    REQUEST
    + """
local key, unseen, cancelled_ms, row = KEYS[1], KEYS[2], tonumber(ARGV[1]), read(KEYS[1])
local ending = {'status', ARGV[2], 'code', ARGV[3], 'headers', ARGV[4], 'ended', ARGV[5], 'body', ARGV[6]}
local id, prefix, at_most = ARGV[7], ARGV[8], tonumber(ARGV[9])
if not row or row.noted then
  write_new(key, row, unpack(ending))
elseif row.over then
  return 'ended'
elseif row.lease > now then
  if not row.cancelling then redis.call('HSET', key, 'cancelling', '1', unpack(ending)) end
  return 'told'
else
  redis.call('HSET', key, 'lease', 0, 'cancelling', '', unpack(ending))
end
end_as_cancelled(key, cancelled_ms)
if row and (row.deferred or not row.noted) then return 'recorded' end
redis.call('ZREMRANGEBYSCORE', unseen, '-inf', now)
redis.call('ZADD', unseen, now + cancelled_ms, id)
redis.call('PEXPIRE', unseen, cancelled_ms)
local came_to = 'unseen'
for _ = 1, 10 do
  if redis.call('ZCARD', unseen) <= at_most then break end
  local oldest = prefix .. redis.call('ZPOPMIN', unseen)[1]
  local old = read(oldest)
  if old and old.over and old.code == 'cancelled' and old.hash == '' then redis.call('DEL', oldest) end
  came_to = 'displaced'
end
return came_to
"""
)
FIND: Final = Script(
    REQUEST
    + """
local row = read(KEYS[1])
if not row then return nil end
if row.over then return {'ended', row.attempts, ending(KEYS[1])} end
if row.lease > now then return {'running', row.attempts, ''} end
return {'waiting', row.attempts, row.due}
"""
)
