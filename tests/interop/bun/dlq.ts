/** Dead letters: reading with filters, figures, retrying, removing, and the configuration of a queue. */
import { addNamed, buryNext, check, eventually, finish, handWorker, holds, ids, openQueue, queueName, same } from './check';

async function buried(count: number) {
  const name = queueName('dlq');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, Array.from({ length: count }, (_, index) => `d${index}`));
  const failed: string[] = [];
  for (let index = 0; index < count; index++) failed.push(await buryNext(queue, worker, `broken ${index}`));
  return { name, queue, worker, failed };
}

await check('an entry tells job, reason, error, attempts and times', async () => {
  const { name, queue, failed } = await buried(1);
  const [entry] = await queue.getDlqAsync();
  same([entry!.job.id, entry!.job.name, entry!.job.data], [failed[0], 'd0', { name: 'data-d0' }], 'job');
  same([entry!.reason, entry!.error, entry!.retryCount], ['max_attempts_exceeded', 'broken 0', 0], 'reason');
  const [attempt] = entry!.attempts;
  same([attempt!.attempt, attempt!.error], [1, 'broken 0'], 'attempt');
  holds(attempt!.failedAt >= attempt!.startedAt && attempt!.duration >= 0, 'attempt times');
  holds(Math.abs(entry!.enteredAt - Date.now()) < 60_000, 'enteredAt');
  holds(entry!.expiresAt! > Date.now(), 'expiresAt');
  same((await queue.getDlqJobsAsync()).map((job) => [job.id, job.name, job.queueName]), [[failed[0], 'd0', name]], 'getDlqJobs');
});

await check('entries are filtered, limited and counted', async () => {
  const { queue } = await buried(4);
  same((await queue.getDlqAsync({ limit: 2 })).length, 2, 'limit');
  same((await queue.getDlqAsync({ limit: 2, offset: 3 })).length, 1, 'offset');
  same((await queue.getDlqAsync({ reason: 'timeout' })).length, 0, 'reason');
  same((await queue.getDlqAsync({ newerThan: Date.now() - 60_000 })).length, 4, 'newerThan');
  same((await queue.getDlqAsync({ olderThan: Date.now() - 60_000 })).length, 0, 'olderThan');
  same((await queue.getDlqJobsAsync(3)).length, 3, 'getDlqJobs with a count');
});

await check('figures tell total, reasons and ages', async () => {
  const { queue } = await buried(3);
  const stats = await queue.getDlqStatsAsync();
  same([stats.total, stats.byReason.max_attempts_exceeded, stats.byReason.stalled], [3, 3, 0], 'totals');
  same([stats.pendingRetry, stats.expired], [0, 0], 'pending and expired');
  holds(stats.newestEntry! >= stats.oldestEntry!, 'oldest and newest');
  const empty = await openQueue(queueName('empty')).getDlqStatsAsync();
  same([empty.total, empty.oldestEntry, empty.newestEntry], [0, null, null], 'of an empty queue');
});

await check('retryDlq brings one or all back as new', async () => {
  const { queue, failed } = await buried(3);
  same(await queue.retryDlqAsync(failed[1]), 1, 'one');
  const job = (await queue.getJob(failed[1]!))!;
  same([await job.getState(), job.attemptsMade, job.failedReason !== ''], ['waiting', 0, true], 'retried job');
  same(await queue.retryDlqAsync('no-such-job'), 0, 'unknown');
  same(await queue.retryDlqAsync(), 2, 'the rest');
  same([await queue.getFailedCount(), await queue.getWaitingCount()], [0, 3], 'counts');
});

await check('retryDlqByFilter retries what matches', async () => {
  const { queue } = await buried(3);
  same(await queue.retryDlqByFilterAsync({ reason: 'stalled' }), 0, 'no match');
  same(await queue.retryDlqByFilterAsync({ reason: 'max_attempts_exceeded', limit: 2 }), 2, 'two of three');
  same(await queue.getFailedCount(), 1, 'left');
});

await check('removeDlqJob removes one, purgeDlq the rest', async () => {
  const { queue, failed } = await buried(3);
  same([await queue.removeDlqJob(failed[0]!), await queue.removeDlqJob(failed[0]!)], [true, false], 'removeDlqJob');
  same(await queue.getJobState(failed[0]!), 'unknown', 'removed job');
  same(await queue.purgeDlqAsync(), 2, 'purged');
  same([(await queue.getDlqAsync()).length, await queue.getJobState(failed[2]!)], [0, 'unknown'], 'nothing left');
});

await check('a retried job that fails again keeps its id and history', async () => {
  const { queue, worker, failed } = await buried(1);
  await queue.retryDlqAsync(failed[0]);
  same(await buryNext(queue, worker, 'broken again'), failed[0], 'same job');
  const [entry] = await queue.getDlqAsync();
  same([entry!.error, ids(await queue.getFailedAsync())], ['broken again', failed], 'entry');
});

await check('configuration is merged over the defaults', async () => {
  const queue = openQueue(queueName('config'));
  const defaults = { autoRetry: false, autoRetryInterval: 3_600_000, maxAutoRetries: 3, maxAge: 604_800_000, maxEntries: 10_000 };
  same(await queue.getDlqConfigAsync(), defaults, 'defaults');
  await queue.setDlqConfigAsync({ autoRetry: true, maxEntries: 2 });
  same(await queue.getDlqConfigAsync(), { ...defaults, autoRetry: true, maxEntries: 2 }, 'merged');
});

await check('maxEntries drops the oldest entry', async () => {
  const name = queueName('bounded');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await queue.setDlqConfigAsync({ maxEntries: 2 });
  await addNamed(queue, ['a', 'b', 'c']);
  const failed: string[] = [];
  for (let index = 0; index < 3; index++) failed.push(await buryNext(queue, worker));
  await eventually(async () => (await queue.getDlqAsync()).length === 2, 'two entries');
  same(ids((await queue.getDlqAsync()).map((entry) => entry.job)), failed.slice(1).sort(), 'the newest');
});

finish();
