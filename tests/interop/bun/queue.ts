/** Queue: adding, reading, counting, pausing, moving and removing jobs through the official client. */
import {
  addNamed, buryNext, check, completeNext, eventually, finish, handWorker, holds, ids, openQueue, queueName,
  refused, same, take,
} from './check';

await check('add stores name, data and options as given', async () => {
  const queue = openQueue(queueName('add'));
  const data = { to: 'a@b', name: 'inner', big: 2 ** 40 + 1, list: [1, null, 'x'], deep: { on: true } };
  const options = { attempts: 4, backoff: { type: 'fixed' as const, delay: 250 }, priority: 7, timeout: 9000 };
  const added = await queue.add('send', data, options);
  const job = await queue.getJob(added.id);
  holds(job, 'the job can be read back');
  same(job!.name, 'send', 'name');
  same(job!.data, data, 'data');
  same([job!.opts.attempts, job!.opts.backoff, job!.priority, job!.opts.timeout], [4, options.backoff, 7, 9000], 'options');
  holds(Math.abs(job!.timestamp - Date.now()) < 60_000, `timestamp is a current time: ${job!.timestamp}`);
  same([job!.attemptsMade, job!.progress, job!.failedReason, job!.returnvalue], [0, 0, undefined, undefined], 'fresh job');
});

await check('jobs without data are added, alone and in bulk', async () => {
  const name = queueName('nodata');
  for (const autoBatch of [{ enabled: false }, { enabled: true }]) {
    const queue = openQueue(name, { autoBatch });
    const added = [await queue.add('tick', undefined), ...(await queue.addBulk([{ name: 'tick', data: undefined }]))];
    for (const { id } of added) same((await queue.getJob(id))!.data ?? null, null, 'data');
  }
});

await check('every option of an add is kept, alone and in bulk', async () => {
  const name = queueName('options');
  for (const autoBatch of [{ enabled: false }, { enabled: true }]) {
    const queue = openQueue(name, { autoBatch });
    const options = {
      priority: 5, delay: 60_000, attempts: 4, backoff: { type: 'exponential' as const, delay: 500 }, timeout: 30_000,
      jobId: `${name}-${autoBatch.enabled}`, removeOnComplete: true, removeOnFail: true, stallTimeout: 45_000, lifo: true,
      stackTraceLimit: 3, keepLogs: 9, sizeLimit: 1_000, timestamp: 1_700_000_000_000,
      deduplication: { id: `key-${autoBatch.enabled}`, ttl: 60_000, extend: false, replace: false },
      debounce: { id: 'd', ttl: 1_000 }, group: { id: 'g' },
    };
    const hidden = { ttl: 2 ** 33, tags: ['red', 'blue'] }; // accepted by the client, not in its types
    const job = (await queue.getJob((await queue.add('full', { v: 1 }, { ...options, ...hidden } as object)).id))!;
    const { delay, timestamp, ...kept } = options;
    for (const [option, value] of Object.entries(kept)) same((job.opts as any)[option], value, option);
    same([job.id, job.timestamp, job.delay >= delay], [options.jobId, timestamp, true], 'id and times');
  }
});

await check('repeat options are kept', async () => {
  const queue = openQueue(queueName('repeat'));
  const repeat = { every: 60_000, limit: 3, startDate: Date.now(), endDate: Date.now() + 3_600_000, tz: 'UTC' };
  const job = (await queue.getJob((await queue.add('tick', {}, { repeat })).id))!;
  for (const [option, value] of Object.entries(repeat)) same((job.opts.repeat as any)[option], value, option);
  await refused(queue.add('both', {}, { repeat: { every: 60_000, pattern: '* * * * *' } }), /exactly one of every or pattern/, 'both');
});

await check('data keeps dates, bytes and absent values', async () => {
  const queue = openQueue(queueName('types'));
  const data = { when: new Date(1_700_000_000_123), bytes: new Uint8Array([0, 255, 7]), ratio: 0.5, none: null };
  const job = await queue.getJob((await queue.add('typed', { ...data, gone: undefined })).id);
  const stored = job!.data as typeof data & { gone?: unknown };
  same(new Date(stored.when).getTime(), data.when.getTime(), 'date');
  same([...stored.bytes], [0, 255, 7], 'bytes');
  same([stored.ratio, stored.none, stored.gone], [0.5, null, undefined], 'plain values');
});

await check('addBulk answers ids in the order of its input', async () => {
  const queue = openQueue(queueName('bulk'));
  const names = Array.from({ length: 120 }, (_, index) => `n${index}`);
  const added = await addNamed(queue, names);
  same(new Set(added).size, 120, 'distinct ids');
  const middle = await queue.getJob(added[57]!);
  same(middle!.name, 'n57', 'name of the 58th job');
  same(await queue.getWaitingCount(), 120, 'waiting');
});

await check('three hundred pipelined adds all arrive', async () => {
  const queue = openQueue(queueName('pipeline'), { autoBatch: { enabled: false } });
  const jobs = await Promise.all(Array.from({ length: 300 }, (_, index) => queue.add(`p${index}`, { index })));
  same(new Set(jobs.map((job) => job.id)).size, 300, 'distinct ids');
  same(await queue.getWaitingCount(), 300, 'waiting');
});

await check('durable add and a payload of one megabyte', async () => {
  const queue = openQueue(queueName('durable'));
  const text = 'x'.repeat(1_000_000);
  const job = await queue.getJob((await queue.add('big', { text }, { durable: true })).id);
  same((job!.data as { text: string }).text.length, text.length, 'length');
  same(job!.opts.durable, true, 'durable');
});

await check('an option out of range refuses the add and stores nothing', async () => {
  const queue = openQueue(queueName('range'));
  await refused(queue.add('bad', {}, { priority: 1.5 }), /priority must be an integer/, 'fractional priority');
  await refused(queue.add('bad', {}, { attempts: 0 }), /maxAttempts must be at least 1/, 'no attempts');
  await refused(openQueue('not a name').add('bad', {}), /Queue name contains invalid characters/, 'queue name');
  same(await queue.getWaitingCount(), 0, 'waiting');
});

await check('getJob of an unknown id is null and its state unknown', async () => {
  const queue = openQueue(queueName('unknown'));
  same(await queue.getJob('no-such-job'), null, 'job');
  same(await queue.getJobState('no-such-job'), 'unknown', 'state');
});

await check('getJobs lists every state and getJobCounts agrees', async () => {
  const name = queueName('states');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.add('done', {});
  const completed = await completeNext(queue, worker, { sum: 3 });
  await queue.add('broken', {});
  const failed = await buryNext(queue, worker, 'no luck');
  await queue.add('running', {});
  const active = String((await take(worker)).id);
  const waiting = await addNamed(queue, ['w1', 'w2']);
  const urgent = (await queue.add('urgent', {}, { priority: 9 })).id;
  const delayed = (await queue.add('later', {}, { delay: 60_000 })).id;
  const blocked = (await queue.add('blocked', {}, { dependsOn: [waiting[0]!] } as object)).id;

  same(ids(await queue.getWaitingAsync()), [...waiting, urgent].sort(), 'waiting includes the urgent one');
  same(ids(await queue.getPrioritized()), [urgent], 'prioritized');
  same(ids(await queue.getDelayedAsync()), [delayed], 'delayed');
  same(ids(await queue.getActiveAsync()), [active], 'active');
  same(ids(await queue.getCompletedAsync()), [completed], 'completed');
  same(ids(await queue.getFailedAsync()), [failed], 'failed');
  same(ids(await queue.getWaitingChildren()), [blocked], 'waiting-children');
  same(
    ids(await queue.getJobsAsync({ state: ['waiting', 'prioritized', 'delayed'], end: -1 })),
    [...waiting, urgent, delayed].sort(),
    'a list of states is a union, each job once',
  );
  same((await queue.getJobsAsync({ end: -1 })).length, 8, 'no state means all');
  same((await queue.getJobsAsync({ state: [], end: -1 })).length, 8, 'and so does an empty list');
  const expected = {
    waiting: 3, prioritized: 1, active: 1, completed: 1, failed: 1, delayed: 1, paused: 0, 'waiting-children': 1,
  };
  same(await queue.getJobCountsAsync(), expected, 'counts');
  same(await queue.getPrioritizedCount(), 1, 'getPrioritizedCount');
  same(await queue.getWaitingChildrenCount(), 1, 'getWaitingChildrenCount');
  same(await queue.countAsync(), 8, 'count is the number of jobs in all states');
});

await check('getState names the state of a job through its life', async () => {
  const name = queueName('life');
  const queue = openQueue(name);
  const worker = handWorker(name);
  const job = await queue.add('one', {}, { delay: 60_000 });
  same(await job.getState(), 'delayed', 'after an add with delay');
  await job.promote();
  same(await job.getState(), 'waiting', 'after promote');
  const held = await take(worker);
  same([await job.getState(), await job.isActive()], ['active', true], 'after the pull');
  await queue.moveJobToCompleted(job.id, 'fine', held.token);
  same([await job.getState(), await job.isCompleted()], ['completed', true], 'after the ack');
  same(await (await queue.add('first', {}, { priority: 3 })).getState(), 'waiting', 'with a priority');
});

await check('getJobs pages and sorts by age', async () => {
  const queue = openQueue(queueName('pages'));
  const added = await addNamed(queue, ['a', 'b', 'c', 'd', 'e']);
  const names = async (options: object) => (await queue.getJobsAsync(options)).map((job) => job.name);
  same(await names({ state: 'waiting', start: 1, end: 3, asc: true }), ['b', 'c'], 'second page');
  same(await names({ state: 'waiting', start: 0, end: 2, asc: false }), ['e', 'd'], 'newest first');
  same((await queue.getJobsAsync({ state: 'waiting', end: -1, asc: true })).map((job) => job.id), added, 'everything');
});

await check('a finished job tells result, attempts and times', async () => {
  const name = queueName('result');
  const queue = openQueue(name);
  const worker = handWorker(name);
  const { id } = await queue.add('sum', {});
  await completeNext(queue, worker, { total: 42, big: 2 ** 41 });
  const job = (await queue.getJob(id))!;
  same(job.returnvalue, { total: 42, big: 2 ** 41 }, 'returnvalue');
  holds(job.processedOn! >= job.timestamp && job.finishedOn! >= job.processedOn!, 'times are in order');
});

await check('a failed job tells reason and stack', async () => {
  const name = queueName('reason');
  const queue = openQueue(name);
  const { id } = await queue.add('bad', {});
  await buryNext(queue, handWorker(name), 'disk on fire');
  const job = (await queue.getJob(id))!;
  same(job.failedReason, 'disk on fire', 'failedReason');
  same(job.attemptsMade, 1, 'attemptsMade');
  holds(job.stacktrace && job.stacktrace[0]!.includes('disk on fire'), `stacktrace: ${job.stacktrace}`);
});

await check('pull order: priority, then LIFO, then FIFO', async () => {
  const name = queueName('order');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.add('first', {});
  await queue.add('second', {});
  await queue.add('stack', {}, { lifo: true });
  await queue.add('low', {}, { priority: -1 });
  await queue.add('high', {}, { priority: 10 });
  const order: string[] = [];
  for (let index = 0; index < 5; index++) order.push((await take(worker)).name);
  same(order, ['high', 'stack', 'first', 'second', 'low'], 'order');
});

await check('a paused queue keeps its jobs waiting and hands out none', async () => {
  const name = queueName('pause');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.pauseAsync();
  same(await queue.isPausedAsync(), true, 'isPaused');
  await addNamed(queue, ['a', 'b']);
  same(await worker.getNextJob(), undefined, 'nothing is handed out');
  const counts = await queue.getJobCountsAsync();
  same([counts.waiting, counts.paused], [2, 0], 'waiting and paused counts');
  await queue.resumeAsync();
  same(await queue.isPausedAsync(), false, 'isPaused after resume');
  same((await take(worker)).name, 'a', 'first job after resume');
});

await check('clean removes by state, age and limit and tells the ids', async () => {
  const name = queueName('clean');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c', 'd']);
  const first = await completeNext(queue, worker);
  const second = await completeNext(queue, worker);
  const failed = await buryNext(queue, worker);
  same(await queue.cleanAsync(60_000, 100, 'completed'), [], 'grace protects the young');
  await eventually(async () => (await queue.cleanAsync(0, 1, 'completed')).length === 1, 'limit of one');
  same((await queue.cleanAsync(0, 100, 'completed')).length, 1, 'the other completed job');
  same([await queue.getJobState(first), await queue.getJobState(second)], ['unknown', 'unknown'], 'both are gone');
  same(await queue.cleanAsync(0, 100, 'failed'), [failed], 'failed');
  same((await queue.cleanAsync(0, 100, 'wait')).length, 1, 'wait');
  same(await queue.countAsync(), 0, 'nothing is left');
});

await check('drain drops waiting and delayed jobs and leaves the others', async () => {
  const name = queueName('drain');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.add('running', {});
  const held = await take(worker);
  await addNamed(queue, ['a', 'b']);
  await queue.add('later', {}, { delay: 60_000 });
  await queue.add('urgent', {}, { priority: 2 });
  same(await queue.drainAsync(), 4, 'dropped');
  const counts = await queue.getJobCountsAsync();
  same([counts.waiting, counts.delayed, counts.active], [0, 0, 1], 'counts');
  await queue.moveJobToCompleted(String(held.id), null, held.token);
});

await check('remove cancels what waits and spares what runs', async () => {
  const name = queueName('remove');
  const queue = openQueue(name);
  const waiting = await queue.add('gone', {});
  await waiting.remove();
  same([await queue.getJob(waiting.id), await waiting.getState()], [null, 'unknown'], 'removed job');
  const running = await queue.add('stays', {});
  await take(handWorker(name));
  await queue.removeAsync(running.id);
  same(await running.getState(), 'active', 'active job');
});

await check('retry brings failed and completed jobs back', async () => {
  const name = queueName('retry');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c']);
  const failed = [await buryNext(queue, worker), await buryNext(queue, worker)];
  const completed = await completeNext(queue, worker, 'old');
  await queue.retryJob(failed[0]!);
  same([await queue.getJobState(failed[0]!), (await queue.getJob(failed[0]!))!.attemptsMade], ['waiting', 0], 'retryJob');
  await refused(queue.retryJob(completed), /Cannot move job from state 'completed' to waiting/, 'retryJob of a completed');
  await queue.retryJobs({ state: 'failed' });
  same(await queue.getJobState(failed[1]!), 'waiting', 'retryJobs failed');
  same(await queue.retryCompletedAsync(completed), 1, 'retryCompleted');
  const again = (await queue.getJob(completed))!;
  same([await again.getState(), again.returnvalue], ['waiting', undefined], 'retried completed job');
});

await check('retryJobs honours count and timestamp', async () => {
  const name = queueName('retry-some');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c']);
  for (let index = 0; index < 3; index++) await buryNext(queue, worker);
  await queue.retryJobs({ state: 'failed', timestamp: Date.now() - 60_000 });
  same(await queue.getFailedCount(), 3, 'nothing failed that long ago');
  await queue.retryJobs({ state: 'failed', count: 2 });
  same([await queue.getFailedCount(), await queue.getWaitingCount()], [1, 2], 'two of three');
});

await check('updateData, changePriority, changeDelay and promote act on a stored job', async () => {
  const name = queueName('change');
  const queue = openQueue(name);
  const [first, second] = await addNamed(queue, ['first', 'second']);
  const later = await queue.add('later', { version: 1 }, { delay: 60_000 });
  await later.updateData({ version: 2 });
  same((await queue.getJob(later.id))!.data, { version: 2 }, 'data');
  await refused(queue.updateJobData('no-such-job', {}), /Job not found or cannot be updated/, 'updateData of nothing');
  await queue.changeJobPriority(second!, { priority: 50 });
  same(await queue.getCountsPerPriorityAsync(), { '0': 2, '50': 1 }, 'counts per priority');
  await later.changeDelay(120_000);
  const delay = (await queue.getJob(later.id))!.delay;
  holds(delay > 60_000 && delay <= 125_000, `delay after changeDelay: ${delay}`);
  await later.promote();
  same(await later.getState(), 'waiting', 'promoted');
  const worker = handWorker(name);
  same([String((await take(worker)).id), String((await take(worker)).id)], [second, first], 'order after the changes');
});

await check('promoteJobs promotes as many as asked', async () => {
  const queue = openQueue(queueName('promote'));
  await addNamed(queue, ['a', 'b', 'c'], { delay: 60_000 });
  same(await queue.promoteJobs({ count: 2 }), 2, 'first call');
  same(await queue.promoteJobs(), 1, 'second call');
  same(await queue.getWaitingCount(), 3, 'waiting');
});

await check('a delayed job is handed out when it is due', async () => {
  const name = queueName('due');
  const queue = openQueue(name);
  const worker = handWorker(name);
  const start = Date.now();
  await queue.add('soon', {}, { delay: 1_000 });
  same(await worker.getNextJob(), undefined, 'not before its time');
  await eventually(() => worker.getNextJob(), 'the job is due');
  holds(Date.now() - start >= 990, `handed out after ${Date.now() - start} ms`);
});

await check('jobId makes an add idempotent while the job lives', async () => {
  const name = queueName('jobid');
  const queue = openQueue(name);
  const id = `${name}-order`;
  const first = await queue.add('charge', { version: 1 }, { jobId: id });
  const second = await queue.add('charge', { version: 2 }, { jobId: id });
  same([first.id, second.id], [id, id], 'ids');
  same((await queue.getJob(id))!.data, { version: 1 }, 'data of the first');
  same(await queue.getWaitingCount(), 1, 'waiting');
  await completeNext(queue, handWorker(name), 'paid');
  await queue.add('charge', { version: 3 }, { jobId: id });
  const next = (await queue.getJob(id))!;
  same([next.data, await next.getState(), next.returnvalue], [{ version: 3 }, 'waiting', undefined], 'next generation');
});

await check('the same jobId in two queues makes two jobs', async () => {
  const [left, right] = [openQueue(queueName('left')), openQueue(queueName('right'))];
  const id = queueName('shared-id');
  const first = await left.add('x', { side: 'left' }, { jobId: id });
  const second = await right.add('x', { side: 'right' }, { jobId: id });
  const again = await right.add('x', { side: 'ignored' }, { jobId: id });
  same([first.id === id, second.id === id, again.id], [true, false, second.id], 'ids');
  same((await right.getJob(second.id))!.data, { side: 'right' }, 'data in the second queue');
  same([await left.getWaitingCount(), await right.getWaitingCount()], [1, 1], 'waiting');
});

await check('deduplication answers the owner until the key is free', async () => {
  const name = queueName('dedup');
  const queue = openQueue(name);
  const options = { deduplication: { id: 'key' } };
  const owner = await queue.add('x', { version: 1 }, options);
  same((await queue.add('x', { version: 2 }, options)).id, owner.id, 'second add');
  same(await queue.getDeduplicationJobId('key'), owner.id, 'getDeduplicationJobId');
  same((await queue.getJob(owner.id))!.deduplicationId, 'key', 'deduplicationId');
  same(await queue.removeDeduplicationKey('key'), 1, 'removeDeduplicationKey');
  same([await queue.removeDeduplicationKey('key'), await queue.getDeduplicationJobId('key')], [0, null], 'key is free');
  const next = await queue.add('x', { version: 3 }, options);
  holds(next.id !== owner.id, 'a new job is stored');
  same(await (await queue.getJob(next.id))!.removeDeduplicationKey(), true, 'job.removeDeduplicationKey');
  same(await queue.getWaitingCount(), 2, 'waiting');
});

await check('a deduplication key is held during retry backoff', async () => {
  const name = queueName('dedup-retry');
  const queue = openQueue(name);
  const options = { deduplication: { id: 'key' }, attempts: 3, backoff: 60_000 };
  const owner = await queue.add('x', {}, options);
  const held = await take(handWorker(name));
  await queue.moveJobToFailed(owner.id, new Error('again'), held.token);
  same(await owner.getState(), 'delayed', 'owner');
  same((await queue.add('x', {}, options)).id, owner.id, 'add during the backoff');
});

await check('deduplication ttl ends, replace replaces', async () => {
  const name = queueName('dedup-ttl');
  const queue = openQueue(name);
  const brief = { deduplication: { id: 'brief', ttl: 150 } };
  const owner = await queue.add('x', {}, brief);
  same((await queue.add('x', {}, brief)).id, owner.id, 'within the ttl');
  await eventually(async () => (await queue.add('x', {}, brief)).id !== owner.id, 'the ttl ends');
  const replaced = await queue.add('y', { version: 1 }, { deduplication: { id: 'swap', replace: true }, delay: 60_000 });
  const current = await queue.add('y', { version: 2 }, { deduplication: { id: 'swap', replace: true }, delay: 60_000 });
  same([await replaced.getState(), await current.getState()], ['unknown', 'delayed'], 'old and new job');
});

await check('an active job moves to delayed, waiting, and only with its token', async () => {
  const name = queueName('move');
  const queue = openQueue(name);
  const worker = handWorker(name);
  const job = await queue.add('x', {});
  const held = await take(worker);
  await refused(queue.moveJobToCompleted(job.id, 1), /Lock token required for job/, 'ack without token');
  await refused(queue.moveJobToCompleted(job.id, 1, 'wrong'), /Invalid or expired lock token for job/, 'ack with a wrong token');
  same(await queue.extendJobLock(job.id, held.token, 60_000), 60_000, 'extendJobLock');
  same(await queue.extendJobLock(job.id, 'wrong', 60_000), 0, 'extendJobLock with a wrong token');
  await queue.moveJobToDelayed(job.id, Date.now() + 60_000, held.token);
  same(await job.getState(), 'delayed', 'moveJobToDelayed');
  same(await queue.moveJobToWait(job.id), true, 'moveJobToWait of a delayed job');
  const again = await take(worker);
  same(again.attempts, 0, 'moving costs no attempt');
  same(await queue.moveJobToWait(job.id, again.token), true, 'moveJobToWait of an active job');
  same(await job.getState(), 'waiting', 'moveJobToWait');
});

await check('removeOnComplete and removeOnFail leave nothing behind', async () => {
  const name = queueName('keep-none');
  const queue = openQueue(name);
  const worker = handWorker(name);
  const done = await queue.add('x', {}, { removeOnComplete: true });
  await completeNext(queue, worker);
  const broken = await queue.add('y', {}, { removeOnFail: true });
  await buryNext(queue, worker);
  same([await done.getState(), await broken.getState()], ['unknown', 'unknown'], 'states');
  same((await queue.getDlqAsync()).length, 0, 'dead letters');
});

await check('logs of a job are kept, ranged and cleared', async () => {
  const queue = openQueue(queueName('logs'));
  const job = await queue.add('x', {});
  for (const line of ['one', 'two', 'three']) same(await queue.addJobLog(job.id, line), 1, 'addJobLog');
  same(await queue.getJobLogs(job.id), { logs: ['[info] one', '[info] two', '[info] three'], count: 3 }, 'all');
  same((await queue.getJobLogs(job.id, 1, 1)).logs, ['[info] two'], 'range');
  await queue.clearJobLogs(job.id, 1);
  same((await queue.getJobLogs(job.id)).logs, ['[info] three'], 'newest kept');
  same(await queue.addJobLog('no-such-job', 'x'), 0, 'addJobLog of nothing');
});

await check('keepLogs bounds the log of a job', async () => {
  const queue = openQueue(queueName('keep-logs'));
  const job = await queue.add('x', {}, { keepLogs: 2 });
  for (const line of ['one', 'two', 'three']) await queue.addJobLog(job.id, line);
  same((await queue.getJobLogs(job.id)).logs, ['[info] two', '[info] three'], 'logs');
});

await check('stall configuration is merged over the defaults', async () => {
  const queue = openQueue(queueName('stall'));
  const defaults = { enabled: true, stallInterval: 30_000, maxStalls: 3, gracePeriod: 5_000 };
  same(await queue.getStallConfigAsync(), defaults, 'defaults');
  await queue.setStallConfigAsync({ maxStalls: 9 });
  same(await queue.getStallConfigAsync(), { ...defaults, maxStalls: 9 }, 'merged');
});

await check('a prefix keeps two tenants apart', async () => {
  const name = queueName('tenant');
  const [red, blue] = [openQueue(name, { prefixKey: 'red-' }), openQueue(name, { prefixKey: 'blue-' })];
  await red.add('x', {});
  same([await red.getWaitingCount(), await blue.getWaitingCount()], [1, 0], 'waiting');
});

await check('obliterate leaves an empty queue with default settings', async () => {
  const name = queueName('obliterate');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c', 'd']);
  const completed = await completeNext(queue, worker);
  const failed = await buryNext(queue, worker);
  const held = await take(worker);
  await queue.setGlobalConcurrencyAsync(1);
  await queue.pauseAsync();
  await queue.obliterateAsync();
  same(await queue.countAsync(), 0, 'count');
  same(await Promise.all([completed, failed, String(held.id)].map((id) => queue.getJobState(id))), ['unknown', 'unknown', 'unknown'], 'states');
  same([await queue.isPausedAsync(), await queue.getGlobalConcurrency()], [false, null], 'settings');
  await refused(queue.moveJobToCompleted(String(held.id), null, held.token), /not found|not in processing/, 'late ack');
});

finish();
