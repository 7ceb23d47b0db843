{{/* What the pods of the head and of every group have in common. */}}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Takes the root and a group's values. */}}
{{- define "outrider.placing" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .group.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
# With service links, Kubernetes would set variables that begin with OUTRIDER_. `outrider serve`
# refuses such variables as unknown settings.
enableServiceLinks: false
{{- end -}}

{{/* Variables of processes that Ray starts, and of those that call it. */}}
{{- define "outrider.rayEnv" -}}
- name: HOME
  value: /home/outrider
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
# By default Ray's workers have a low priority. These workers serve requests.
- name: RAY_worker_niceness
  value: "0"
# Ray asks a process to end, and kills it after this time. A hung process must be killed soon.
- name: RAY_kill_worker_timeout_milliseconds
  value: "100"
# Ray starts a process again that is not ready after this time, in seconds. The default is 60 s.
- name: RAY_worker_register_timeout_seconds
  value: "180"
# Without the next two variables, the file of the workers' standard error has no size limit.
- name: RAY_ROTATION_MAX_BYTES
  value: "16777216"
- name: RAY_ROTATION_BACKUP_COUNT
  value: "3"
{{- end -}}

{{/* Actors read the passwords from these variables. Ray does not get them. */}}
{{- define "outrider.redisEnv" -}}
{{- $redis := include "outrider.redisSecret" . | fromJson -}}
{{- with $redis.name -}}
- name: OUTRIDER_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $redis.key }}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.external.sentinelSecret }}
- name: OUTRIDER_REDIS_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.sentinelSecret }}
      key: {{ .Values.redis.external.sentinelSecretKey }}
{{- end -}}
{{- end -}}

{{- define "outrider.modelEnv" -}}
{{- if ne .Values.cache.kind "image" }}
- name: OUTRIDER_CACHE
  value: {{ .Values.cache.mountPath }}/converted
- name: HF_HOME
  value: {{ .Values.cache.mountPath }}/huggingface
{{- end }}
# A model may come with Python code. If the settings trust this code, it is copied to this directory.
- name: HF_MODULES_CACHE
  value: /home/outrider/huggingface-modules
{{- end -}}

{{/* Writable directories; the root file system is read-only. The operator adds volumes with the names
ray-logs and shared-mem unless they exist. */}}
{{- define "outrider.scratchMounts" -}}
- {name: scratch, mountPath: /tmp}
- {name: ray-logs, mountPath: /tmp/ray}
- {name: shared-mem, mountPath: /dev/shm}
- {name: home, mountPath: /home/outrider}
{{- end -}}

{{/* Takes the root and a group's values. Kubernetes evicts a pod that exceeds a size limit. */}}
{{- define "outrider.scratchVolumes" -}}
- {name: scratch, emptyDir: {sizeLimit: {{ .root.Values.scratch.tmp }}}}
- {name: ray-logs, emptyDir: {sizeLimit: {{ .root.Values.scratch.logs }}}}
- {name: home, emptyDir: {sizeLimit: {{ .root.Values.scratch.home }}}}
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .group.sharedMemory }}
{{- end -}}

{{/* The models, and the authority that has signed Redis's certificate. Takes the root, and whether the
models are read-only. */}}
{{- define "outrider.dataMounts" -}}
{{- if ne .root.Values.cache.kind "image" }}
- {name: models, mountPath: {{ .root.Values.cache.mountPath }}, readOnly: {{ .readOnly }}}
{{- end }}
{{- if include "outrider.caFromSecret" .root }}
- {name: redis-ca, mountPath: /etc/outrider/redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "outrider.dataVolumes" -}}
{{- $cache := .Values.cache -}}
{{- if eq $cache.kind "claim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "outrider.fullname" .)) $cache.claim.existing }}
{{- else if eq $cache.kind "hostPath" }}
- name: models
  hostPath:
    path: {{ required "cache.kind is hostPath: cache.hostPath must name a directory of the nodes" $cache.hostPath }}
    type: Directory
{{- end }}
{{- if include "outrider.caFromSecret" . }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.caSecret }}
{{- end }}
{{- end -}}

{{/* The file of API keys, for the processes that check them. */}}
{{- define "outrider.keysPath" -}}
/etc/outrider/keys/{{ .Values.security.keysKey }}
{{- end -}}

{{- define "outrider.keysMount" -}}
{{- if .Values.security.keysSecret }}
- {name: keys, mountPath: /etc/outrider/keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "outrider.keysVolume" -}}
{{- if .Values.security.keysSecret }}
- name: keys
  secret:
    secretName: {{ .Values.security.keysSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.security.keysKey }}, path: {{ .Values.security.keysKey }}}
{{- end }}
{{- end -}}

{{/* The API keys of callers, and the certificate of a role. Takes the root and the role's name. The
mounts are whole directories, so that running pods see changes of a Secret. */}}
{{- define "outrider.lockMounts" -}}
{{- if eq .name "coordinator" }}
{{- include "outrider.keysMount" .root }}
{{- end }}
{{- if .root.Values.security.internalTlsSecret }}
- {name: internal-tls, mountPath: /etc/outrider/internal, readOnly: true}
{{- end }}
{{- end -}}

{{- define "outrider.lockVolumes" -}}
{{- if eq .name "coordinator" }}
{{- include "outrider.keysVolume" .root }}
{{- end }}
{{- with .root.Values.security.internalTlsSecret }}
- name: internal-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: ca.pem, path: ca.pem}
      - {key: {{ $.name }}.pem, path: {{ $.name }}.pem}
      - {key: {{ $.name }}-key.pem, path: {{ $.name }}-key.pem}
{{- end }}
{{- end -}}
