-- The functions of the Redis store for groups (consumers/state/groups.py). A group is a hash: its head as JSON, and how
-- many requests it has of each kind, which `count` in requests.lua keeps. The ids of its requests are a list, in their
-- order. A tenant's groups are in a sorted set by their ends, and all tenants' in one by their creation.
function run.group()
  return {now, redis.call('HGETALL', KEYS[1])}
end

-- Swaps a group's head, if it is as expected (nothing: there is no group). One that is void is in no set.
function run.swap_group(id, expected, head, keep_ms, created_ms, place, is_void)
  if (redis.call('HGET', KEYS[1], 'head') or '') ~= expected then return 0 end
  redis.call('HSET', KEYS[1], 'head', head)
  keep_ms = math.max(tonumber(keep_ms), now + redis.call('PTTL', KEYS[1]))
  redis.call('PEXPIREAT', KEYS[1], keep_ms)
  if is_void == '1' then
    redis.call('ZREM', KEYS[2], id)
    redis.call('ZREM', KEYS[3], place)
    return 1
  end
  redis.call('ZADD', KEYS[3], created_ms, place)
  redis.call('ZADD', KEYS[2], keep_ms, id)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('PEXPIREAT', KEYS[2], redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2])
  return 1
end

function run.groups_of(begin)
  local found = {}
  for i, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
    found[i] = {id, redis.call('HGETALL', begin .. id)}
  end
  return found
end

-- The groups after a place, the newest first, of `most` ones that are looked at. Those that have expired are removed.
function run.newest_groups(begin, created_ms, place, most)
  local first = redis.call('ZCOUNT', KEYS[1], '(' .. created_ms, '+inf')
  local same = redis.call('ZRANGE', KEYS[1], created_ms, created_ms, 'BYSCORE', 'REV')
  for _, each in ipairs(same) do
    if each < place then break end
    first = first + 1
  end
  local places = redis.call('ZRANGE', KEYS[1], first, first + most - 1, 'REV')
  local found = {}
  for _, each in ipairs(places) do
    if redis.call('HEXISTS', begin .. each, 'head') == 0 then redis.call('ZREM', KEYS[1], each)
    else found[#found + 1] = {each, redis.call('HGETALL', begin .. each)} end
  end
  return {#places, found}
end

-- Removes groups that have expired from the list of all, of `count` ones from a place on (0 to 1, of all).
function run.tidy_groups(begin, count, part)
  local first = math.floor(part * redis.call('ZCARD', KEYS[1]))
  local removed = 0
  for _, each in ipairs(redis.call('ZRANGE', KEYS[1], first, first + count - 1)) do
    if redis.call('EXISTS', begin .. each) == 0 then removed = removed + redis.call('ZREM', KEYS[1], each) end
  end
  return removed
end

-- Some of the groups that may have ended, and whose end was not told.
function run.ended_groups(most)
  local found = {}
  for _, group in ipairs(redis.call('SRANDMEMBER', KEYS[1], most)) do
    local values = redis.call('HGETALL', group)
    if #values == 0 then redis.call('SREM', KEYS[1], group) else found[#found + 1] = {group, values} end
  end
  return found
end

function run.end_was_told()
  redis.call('SREM', KEYS[1], KEYS[2])
  if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'told', 1) end
end

function run.count_groups()
  return redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf')
end

-- The next requests of a group that are still kept, and the place of the last one that was looked at (0: there was
-- none). Of their results, no more than `most_bytes` are read, but at least one.
function run.members(requests, after, most, most_bytes)
  local ids = redis.call('LRANGE', KEYS[1], after, after + most - 1)
  local found, last, size = {}, 0, 0
  most_bytes = tonumber(most_bytes)
  for i, id in ipairs(ids) do
    last = after + i
    local row = redis.call('HMGET', requests .. id, 'status', 'code', 'headers', 'ended', 'cancelling')
    if row[1] then
      local body = most_bytes > 0 and row[1] ~= '' and redis.call('HGET', requests .. id, 'body') or ''
      found[#found + 1] = {last, id, row[1], row[2], row[3], row[4], row[5], body}
      size = size + #body
    end
    if most_bytes > 0 and size >= most_bytes then break end
  end
  return {last, found}
end

function run.remove_members(requests, followed, entries, count)
  local ids = redis.call('LRANGE', KEYS[1], 0, count - 1)
  redis.call('LTRIM', KEYS[1], count, -1)
  for _, id in ipairs(ids) do redis.call('DEL', requests .. id, followed .. id, entries .. id) end
  return #ids
end
