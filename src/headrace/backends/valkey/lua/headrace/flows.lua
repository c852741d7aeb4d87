-- Workflows: a record with a revision, a log that only grows, and jobs that belong to it. All of it is kept with the
-- queue in which the flow is decided upon, and changed only by naming the revision that was seen.
--
-- hr:flow:<id>      the record; hr:flow-log:<id> its log, each entry as the client packed it
-- hr:flows          ids of all flows, sorted; hr:flows-ended those that have ended, by when
-- hr:step-queues    key prefixes of the queues that jobs of these flows went to
-- A job of a flow has the key prefix of that queue in `hf`.

do
  local ENTRY_ARGS = 3 -- fields of the record `FlowEntry`
  local SCANNED = 1000
  local LIVE_JOBS = { waiting = true, delayed = true, active = true }
  local LIVE = { pending = true, running = true, compensating = true }
  local FIELDS = { 'workflow', 'status', 'revision', 'created', 'updated', 'ended' }

  local function flow_key(queue, id)
    return queue.p .. ':hr:flow:' .. id
  end

  local function log_key(queue, id)
    return queue.p .. ':hr:flow-log:' .. id
  end

  -- The record as a list in the order of FIELDS, or nil.
  local function read_flow(queue, id)
    local found = call('HMGET', flow_key(queue, id), unpack(FIELDS))
    return found[1] and found or nil
  end

  -- -- changing -----------------------------------------------------------------------------------------------------------

  local function tell_change(word, queue, flow, id, action)
    tell_queue(word, queue, { job = id, name = flow[1], action = action })
  end

  local function append(queue, flow, id, args, at, count)
    for i = at, at + count * ENTRY_ARGS - 1, ENTRY_ARGS do
      local kind, step = args[i], args[i + 1]
      call('RPUSH', log_key(queue, id), args[i + 2])
      if step ~= '' then tell_change('flow-step', queue, flow, id, kind .. ':' .. step) end
    end
    return at + count * ENTRY_ARGS
  end

  local function push_rest(queue, args, at, keys)
    local noted = {}
    while args[at] do
      local home = push(read_new(args, at, keys)).queue.p
      if not noted[home] then call('SADD', queue.p .. ':hr:step-queues', home) end
      noted[home] = true
      at = at + JOB_ARGS
    end
  end

  -- An id has one flow, whatever its queue. The entry may also be that of another id with the same hash, or be left over.
  local function flow_elsewhere(queue, id, registry, noted)
    local before = call('GET', registry)
    if before == noted then return nil end
    local other = before and cjson.decode(before)
    if other and other.flow == id then
      local found = read_flow(queue_at(queue.root .. ':{' .. other.queue .. '}'), id)
      if found then return found, other.queue end
    end
    call('SET', registry, noted)
  end

  local function start(queue, args, keys)
    local id, workflow, mark, registry, noted, count = unpack(args, 2, 7)
    local known, home = nil, queue.name
    if registry ~= '' then known, home = flow_elsewhere(queue, id, registry, noted) end
    known = known or read_flow(queue, id)
    if known then return { known, home or queue.name } end
    local flow = { workflow, 'running', '1', NOW_TEXT, NOW_TEXT, '' }
    local fields = { 'mark', mark }
    for i, field in ipairs(FIELDS) do
      fields[#fields + 1] = field
      fields[#fields + 1] = flow[i]
    end
    call('HSET', flow_key(queue, id), unpack(fields))
    call('ZADD', queue.p .. ':hr:flows', 0, id)
    tell_change('flow-started', queue, flow, id)
    push_rest(queue, args, append(queue, flow, id, args, 8, tonumber(count)), keys)
    return { flow, '' }
  end

  verb('startFlow', 'id workflow mark registry noted entries FlowEntry* NewJob*', start, NEEDS_MEMORY)

  local function check_flow(queue, id, revision)
    local flow = read_flow(queue, id)
    if not flow then refuse('not_found', 'Flow not found: ' .. id) end
    if not LIVE[flow[2]] then refuse('conflict', 'Flow ' .. id .. ' has ended') end
    if flow[3] ~= revision then
      refuse('conflict', 'Flow ' .. id .. ' has changed: it is at revision ' .. flow[3] .. ', not ' .. revision)
    end
    return flow
  end

  -- The job that made the step, if its holder may complete it.
  local function check_ack(ack)
    local job = check_lease(ack.queue, ack.id, ack.token, true)
    if not job then refuse('lease_lost', 'Invalid or expired lock token for job ' .. ack.id) end
    if links(job)['repeat'] then refuse('refused', 'A job that repeats cannot be completed with a step: ' .. ack.id) end
    return job
  end

  -- Whoever waits for the flow at another broker.
  local function publish_change(queue, id, is_ended)
    local watched = meta(queue).hrWatched
    if not watched or tonumber(watched) <= NOW then return end
    call('PUBLISH', queue.root .. ':hr:flow-changes', (is_ended and 'ended ' or 'changed ') .. id)
  end

  local function change(queue, flow, id, status)
    flow[2] = status ~= '' and status or flow[2]
    flow[3] = str(tonumber(flow[3]) + 1)
    flow[5] = NOW_TEXT
    local is_ended = not LIVE[flow[2]]
    if is_ended then
      flow[6] = NOW_TEXT
      call('ZADD', queue.p .. ':hr:flows-ended', NOW_TEXT, id)
    end
    call('HSET', flow_key(queue, id), 'status', flow[2], 'revision', flow[3], 'updated', flow[5], 'ended', flow[6])
    publish_change(queue, id, is_ended)
  end

  local function live_job(homes, id, job_id)
    for _, home in ipairs(homes) do
      local job = find(queue_at(home), job_id)
      if job and LIVE_JOBS[word(job)] and links(job).flowId == id then return job end
    end
  end

  -- A job of the flow that is not wanted any more. Whoever decides that needs no news of its end.
  local function drop(homes, id, job_id)
    local job = live_job(homes, id, job_id)
    if job then withdraw(job) end
  end

  -- The same for one whose end counts all the same: if it is at work, its worker tells.
  local function stop(homes, id, job_id)
    local job = live_job(homes, id, job_id)
    if job and word(job) ~= 'active' then
      tell_flow_of_removal(job, 'its flow was stopped')
      withdraw(job)
    end
  end

  -- A decision: as a whole, or refused before anything is written.
  local function advance(queue, args, keys)
    local id, revision, status = unpack(args, 2, 4)
    local acks, entries, drops, stops = unpack(args, 5, 8)
    local flow, at = check_flow(queue, id, revision), 9
    if tonumber(acks) > 0 then
      local ack = read_ack(args, at, keys)
      complete_one(check_ack(ack), ack)
      at = at + ACK_ARGS
    end
    change(queue, flow, id, status)
    at = append(queue, flow, id, args, at, tonumber(entries))
    if status ~= '' and status ~= 'running' then tell_change('flow-' .. status, queue, flow, id) end
    local stops_at = at + tonumber(drops)
    local rest_at = stops_at + tonumber(stops)
    local homes = rest_at > at and call('SMEMBERS', queue.p .. ':hr:step-queues') or {}
    for i = at, stops_at - 1 do drop(homes, id, args[i]) end
    for i = stops_at, rest_at - 1 do stop(homes, id, args[i]) end
    push_rest(queue, args, rest_at, keys)
    return { flow }
  end

  verb('advanceFlow', 'id revision status acks entries drops stops Completion? FlowEntry* id* NewJob*', advance, NEEDS_MEMORY)

  -- -- news of jobs -------------------------------------------------------------------------------------------------------

  -- As ids are made elsewhere, with the mark of the queue at the end; a counter is enough where nothing is random.
  local function decision_id(home, mark)
    local stamp = string.format('%012x', NOW)
    local n = string.format('%012x', call('HINCRBY', home.p .. ':hr:count', 'decisions', 1))
    return string.sub(stamp, 1, 8) .. '-' .. string.sub(stamp, 9) .. '-7' .. string.sub(n, 1, 3) .. '-8' .. string.sub(n, 4, 6) .. '-' .. string.sub(n, 7) .. mark
  end

  -- The queue, id and mark of the live flow that a job belongs to.
  local function live_flow_of(job)
    local home = job.h.hf and queue_at(job.h.hf)
    local id = home and links(job).flowId
    if not id then return end
    local status, mark = unpack(call('HMGET', flow_key(home, id), 'status', 'mark'))
    if LIVE[status] then return home, id, mark end
  end

  local function is_decision(job, home)
    return job.h.name == 'decide' and job.queue.p == home.p
  end

  local function news_of(kind, id, job, text)
    local name = job.h.name ~= '' and job.h.name or cjson.null
    return cjson.encode({ flow = id, news = kind, job = job.id, name = name, error = text })
  end

  local function push_decision(home, id, mark, data)
    push({
      queue = home,
      id = decision_id(home, mark),
      name = 'decide',
      data = data,
      raw = '',
      created = NOW_TEXT,
      run = NOW_TEXT,
      priority = '0',
      max_attempts = '100',
      -- Who decides must not give up because a worker was killed a few times.
      extra = {
        flow = home.p,
        links = { flowId = id },
        settings = { maxAttempts = 100 },
        opts = '{"attempts":100,"backoff":{"type":"exponential","delay":1000}}',
        size = #data,
      },
    })
  end

  -- A job of a workflow ended without success: have somebody decide how the workflow goes on.
  tell_flow = function(job, text)
    local home, id, mark = live_flow_of(job)
    if home and not is_decision(job, home) then push_decision(home, id, mark, news_of('job-lost', id, job, text)) end
  end

  -- The same for one that was taken away. A decision is then still to be made: nobody else would ever tell its news.
  tell_flow_of_removal = function(job, why)
    local home, id, mark = live_flow_of(job)
    if not home then return end
    push_decision(home, id, mark, is_decision(job, home) and job.h.data or news_of('job-removed', id, job, why))
  end

  -- -- looking ------------------------------------------------------------------------------------------------------------

  -- Flows by id, the last ones first, and where to go on when the page is not full though there are more.
  verb('flows', 'workflow status limit before', function(queue, args)
    local workflow, status, limit = args[2], args[3], tonumber(args[4])
    local before = args[5] ~= '' and '(' .. args[5] or '+'
    local ids, found = call('ZREVRANGEBYLEX', queue.p .. ':hr:flows', before, '-', 'LIMIT', 0, SCANNED), {}
    for _, id in ipairs(ids) do
      local flow = read_flow(queue, id)
      if flow and (workflow == '' or flow[1] == workflow) and (status == '' or flow[2] == status) then
        flow[#FIELDS + 1] = id
        found[#found + 1] = flow
        if #found >= limit then return { found, '' } end
      end
    end
    return { found, #ids == SCANNED and ids[SCANNED] or '' }
  end)

  -- Forget the oldest of the ended flows: those beyond the kept number, and those that ended too long ago.
  verb('retireFlows', 'kept keptMs limit', function(queue, args)
    local key, limit = queue.p .. ':hr:flows-ended', tonumber(args[4])
    local over = math.min(call('ZCARD', key) - tonumber(args[2]), limit)
    local ids = over > 0 and call('ZRANGE', key, 0, over - 1) or {}
    if #ids < limit then
      local horizon = '(' .. str(NOW - tonumber(args[3]))
      local old = call('ZRANGEBYSCORE', key, '-inf', horizon, 'LIMIT', 0, limit)
      if #old > #ids then ids = old end -- both begin with the oldest
    end
    for _, id in ipairs(ids) do
      call('UNLINK', flow_key(queue, id), log_key(queue, id))
      call('ZREM', key, id)
      call('ZREM', queue.p .. ':hr:flows', id)
    end
    return { ids }
  end)
end
