"""The Lua scripts with which the Redis store keeps the progress of requests that clients follow (submissions and
entries). They take the same decisions as `consumers/state/sqlite/following.py`.

A submission is a Redis hash; its entries are a Redis stream with the ids `0-<number>`. A script gets three keys for a
request: of its claim and result, of its submission, of its entries. If Redis has no memory or disk space left, it
refuses the first write of a script, so that a refused script has changed nothing.
"""

from typing import Final

from consumers.state.redis.request_scripts import FORGET_EVENTS, REQUEST
from consumers.state.redis.script import Script

_ADD = """
local function add(followed, hash, lane, streams, submitted, due, deadline)
  redis.call('HSET', followed, 'hash', hash, 'lane', lane, 'streams', streams, 'submitted', submitted, 'due', due,
    'deadline', deadline, 'last', 0, 'events', 0, 'bytes', 0)
end
"""
FOLLOW: Final = Script(
    REQUEST
    + _ADD
    + """
local row, keep_until = read(KEYS[1]), tonumber(ARGV[1])
local hash = ARGV[4]
if row and not row.noted then
  return row.hash ~= '' and row.hash ~= hash and 'conflict' or 'known'
end
local before = row and row.deferred and redis.call('HGET', KEYS[2], 'hash')
if before then return before == hash and 'known' or 'conflict' end
write_new(KEYS[1], row, 'noted', '1')
-- The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`, so go on after it.
local ended = tonumber(redis.call('HGET', KEYS[2], 'last'))
local number = ended and ended + 2 or 1
redis.call('DEL', KEYS[2], KEYS[3])
add(KEYS[2], unpack(ARGV, 4, 9))
redis.call('XADD', KEYS[3], '0-' .. number, ARGV[2], ARGV[3])
redis.call('HSET', KEYS[2], 'last', number, 'bytes', #ARGV[3])
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], keep_until - now) end
return 'new'
"""
)
UNFOLLOW: Final = Script(
    REQUEST
    + """
local row = read(KEYS[1])
if row and row.deferred then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
"""
)
SUBMISSION: Final = Script(
    "return redis.call('HMGET', KEYS[1], 'hash', 'lane', 'streams', 'submitted', 'due', 'deadline')"
)
APPEND: Final = Script(
    REQUEST
    + FORGET_EVENTS
    + _ADD
    + """
local keep_ms, events_at_most, bytes_at_most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local at, results = 4, {}
local function append(request, followed, entries, token, count)
  local row = read(request)
  if not row or row.over or row.token ~= token then return 'fenced' end
  local held = redis.call('HMGET', followed, 'last', 'events', 'bytes')
  local last, events, bytes = tonumber(held[1]) or 0, tonumber(held[2]) or 0, tonumber(held[3]) or 0
  local starts, has_events = 0, false
  for i = 1, count do
    if ARGV[at + 7 + 2 * i - 1] == 'restart' then starts = i end
  end
  if starts > 0 then events, bytes = 0, 0 end
  local kept = {}
  for i = 1, count do
    local kind, body = ARGV[at + 7 + 2 * i - 1], ARGV[at + 7 + 2 * i]
    if kind ~= 'event' or i >= starts then
      kept[#kept + 1] = {kind, body}
      bytes = bytes + #body
      if kind == 'event' then
        events = events + 1
        has_events = true
      end
    end
  end
  if has_events and (events > events_at_most or bytes > bytes_at_most) then return 'full' end
  if not held[1] then add(followed, unpack(ARGV, at + 2, at + 7)) end
  if starts > 0 then  -- another call has begun, so the events of the call before are not needed
    forget_events(entries)
  end
  for _, entry in ipairs(kept) do
    last = last + 1
    redis.call('XADD', entries, '0-' .. last, entry[1], entry[2])
  end
  redis.call('HSET', followed, 'last', last, 'events', events, 'bytes', bytes)
  redis.call('PEXPIRE', followed, keep_ms)
  redis.call('PEXPIRE', entries, keep_ms)
  return ''
end
for i = 1, #KEYS, 3 do
  local token, count = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  results[#results + 1] = append(KEYS[i], KEYS[i + 1], KEYS[i + 2], token, count)
  at = at + 8 + 2 * count
end
return results
"""
)
LOOK: Final = Script(
    """
local most, left, news = tonumber(ARGV[1]), tonumber(ARGV[2]), {}
for i = 1, #KEYS, 3 do
  local after = tonumber(ARGV[2 + (i + 2) / 3])
  local status = redis.call('HMGET', KEYS[i], 'token', 'status', 'cancelling')
  local last = tonumber(redis.call('HGET', KEYS[i + 1], 'last')) or 0
  local ended = (status[2] or '') ~= '' and status[3] ~= '1'
  if last > after or ended or not status[1] then
    local entries = {}
    if last > after and left > 0 then
      entries = redis.call('XRANGE', KEYS[i + 2], '0-' .. (after + 1), '+', 'COUNT', math.min(most, left))
      left = left - #entries
    end
    news[#news + 1] = {(i - 1) / 3, last, ended and 1 or 0, status[1] and 1 or 0, entries}
  end
end
return news
"""
)
