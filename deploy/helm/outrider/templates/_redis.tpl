{{/* A Redis server of the release. Takes the root, the server's component and name, the name and key
of the Secret with its password, and the server's values. */}}
{{- define "outrider.redisServer" -}}
{{- $server := .server }}
{{- $root := .root }}
{{- $name := .name }}
{{- $secret := .secret }}
{{- if not $server.auth.existingSecret }}
{{- $known := lookup "v1" "Secret" $root.Release.Namespace $name }}
{{- $password := $server.auth.password }}
{{- if and (not $password) $known }}
{{- $password = get $known.data "redis-password" | b64dec }}
{{- end }}
apiVersion: v1
kind: Secret
metadata:
  name: {{ $name }}
  labels:
    {{- include "outrider.labels" $root | nindent 4 }}
type: Opaque
stringData:
  redis-password: {{ default (randAlphaNum 32) $password | quote }}
---
{{- end }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels:
    {{- include "outrider.labels" $root | nindent 4 }}
data:
  redis.conf: |
    dir /data
    # Sessions survive a restart. A crash loses at most the last second of writes, which coordinators
    # restore.
    appendonly yes
    appendfsync everysec
    # An evicted session would be lost. So when the memory is full, writes are refused.
    maxmemory {{ $server.maxmemory }}
    maxmemory-policy noeviction
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "outrider.labels" $root | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "outrider.componentLabels" $ | nindent 4 }}
  ports:
    - name: redis
      port: 6379
      targetPort: redis
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "outrider.labels" $root | nindent 4 }}
spec:
  serviceName: {{ $name }}
  replicas: 1
  selector:
    matchLabels:
      {{- include "outrider.componentLabels" $ | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "outrider.componentLabels" $ | nindent 8 }}
        {{- with $server.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        checksum/maxmemory: {{ $server.maxmemory | sha256sum }}
        {{- with $server.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "outrider.placing" (dict "root" $root "group" $server) | trim | nindent 6 }}
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 60
      securityContext:
        runAsNonRoot: true
        runAsUser: 999
        runAsGroup: 999
        fsGroup: 999
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: redis
          image: {{ include "outrider.imageName" $root.Values.redis.image }}
          imagePullPolicy: {{ $root.Values.redis.image.pullPolicy }}
          # Process lists show arguments, so the password is passed by standard input.
          command:
            - /bin/sh
            - -c
            - |-
              exec redis-server /etc/redis/redis.conf - <<EOF
              requirepass "$REDIS_PASSWORD"
              EOF
          env:
            - name: REDIS_PASSWORD
              valueFrom:
                secretKeyRef:
                  name: {{ $secret.name }}
                  key: {{ $secret.key }}
          ports:
            - {name: redis, containerPort: 6379}
          readinessProbe:
            exec:
              command:
                - /bin/sh
                - -c
                - REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli ping | grep -q PONG
            periodSeconds: 5
            timeoutSeconds: 3
          # While Redis loads its file, it accepts connections, but answers no command.
          livenessProbe:
            tcpSocket:
              port: redis
            initialDelaySeconds: 10
            periodSeconds: 10
            failureThreshold: 6
          resources:
            {{- toYaml $server.resources | nindent 12 }}
          securityContext:
            {{- include "outrider.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /data}
            - {name: scratch, mountPath: /tmp}
            - {name: config, mountPath: /etc/redis, readOnly: true}
      volumes:
        - {name: scratch, emptyDir: {sizeLimit: {{ $root.Values.scratch.tmp }}}}
        - name: config
          configMap:
            name: {{ $name }}
        {{- if not $server.persistence.enabled }}
        - {name: data, emptyDir: {sizeLimit: {{ $server.persistence.size }}}}
        {{- end }}
  {{- if $server.persistence.enabled }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $server.persistence.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $server.persistence.size }}
  {{- end }}
{{- end -}}
